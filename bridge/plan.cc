#include "plan.h"

#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "interpreter.h"

namespace jax_mxfp4_moe {
namespace {

constexpr DType kDTypes[] = {
    {"bfloat16", ffi::BF16, {kDLBfloat, 16, 1}},
    {"float16", ffi::F16, {kDLFloat, 16, 1}},
    {"float32", ffi::F32, {kDLFloat, 32, 1}},
    {"uint8", ffi::U8, {kDLUInt, 8, 1}},
    {"int8", ffi::S8, {kDLInt, 8, 1}},
    {"int32", ffi::S32, {kDLInt, 32, 1}},
    {"int64", ffi::S64, {kDLInt, 64, 1}},
    {"float8_e4m3fn", ffi::F8E4M3FN, {kDLFloat8_e4m3fn, 8, 1}},
    {"float8_e5m2", ffi::F8E5M2, {kDLFloat8_e5m2, 8, 1}},
    {"float8_e8m0fnu", ffi::F8E8M0FNU, {kDLFloat8_e8m0fnu, 8, 1}},
    {"bool", ffi::PRED, {kDLBool, 8, 1}},
};

std::mutex plans_mutex;
auto* plans = new std::unordered_map<int64_t, std::weak_ptr<Plan>>;  // never destroyed: executables may outlive statics

}  // namespace

const DType* FindDType(std::string_view name) {
  for (const DType& dtype : kDTypes) {
    if (name == dtype.name) return &dtype;
  }
  return nullptr;
}

BufferSpec BufferSpec::Make(std::string_view dtype, std::vector<int64_t> dims) {
  const DType* found = FindDType(dtype);
  if (found == nullptr) throw std::invalid_argument("no such dtype in the bridge: " + std::string(dtype));
  std::vector<int64_t> strides(dims.size());
  int64_t stride = 1;
  for (size_t axis = dims.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= dims[axis] > 1 ? dims[axis] : 1;
  }
  return BufferSpec{found, std::move(dims), std::move(strides)};
}

int64_t BufferSpec::size_bytes() const {
  int64_t bytes = dtype->dlpack.bits / 8;
  for (int64_t dim : dims) bytes *= dim;
  return bytes;
}

Plan::~Plan() {  // an executable dies on any thread (rule 6)
  DropLater(run);
  DropLater(prepare);
  DeleteViewBlock(spare_views.load());
}

void AddPlan(const PlanPtr& plan) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  for (auto it = plans->begin(); it != plans->end();) {
    it = it->second.expired() ? plans->erase(it) : std::next(it);
  }
  (*plans)[plan->id] = plan;
}

PlanPtr FindPlan(int64_t id) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  auto it = plans->find(id);
  return it == plans->end() ? nullptr : it->second.lock();
}

}  // namespace jax_mxfp4_moe
