// A plan: what one custom call is. Python builds it; it does not change afterwards.
#pragma once

#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dlpack_header.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mxfp4_moe {

namespace ffi = xla::ffi;

// The dtypes that JAX, DLPack and torch all name. float4 is not among them: it travels as uint8 (rule 3).
struct DType {
  const char* name;
  ffi::DataType xla;
  DLDataType dlpack;
};
const DType* FindDType(std::string_view name);  // null if unknown

struct BufferSpec {
  const DType* dtype;
  std::vector<int64_t> dims;
  std::vector<int64_t> strides;  // row-major, always explicit (rule 3)

  static BufferSpec Make(std::string_view dtype, std::vector<int64_t> dims);  // throws std::invalid_argument
  int64_t size_bytes() const;  // from dims, never from the runtime's size_bytes() (rule 3)
};

// How far EXECUTE goes. Everything but kTorch exists for benchmarks and for builds without torch.
enum class Mode { kTorch, kPointers, kGil, kNoop };

struct ViewBlock;  // dlpack_view.cc
void DeleteViewBlock(ViewBlock* block);

struct Plan {
  static constexpr int kMaxDevices = 128;

  int64_t id;
  std::string name;
  std::vector<BufferSpec> inputs;
  std::vector<BufferSpec> results;  // outputs, then the workspace if there is one
  bool has_workspace;
  Mode mode;
  PyObject* run;      // run(inputs: list, outputs: list, workspace | None), owned
  PyObject* prepare;  // prepare(device ordinal, platform), once for each device before the first run; owned, or null
  std::array<std::atomic<bool>, kMaxDevices> prepared{};
  std::atomic<int64_t> calls{0};
  std::atomic<ViewBlock*> spare_views{nullptr};  // of the last call, for the next one; owned

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan();
};

using PlanPtr = std::shared_ptr<Plan>;

// The process's plans by id. Weak: Python and the executables own them (rule 1).
void AddPlan(const PlanPtr& plan);
PlanPtr FindPlan(int64_t id);

}  // namespace jax_mxfp4_moe
