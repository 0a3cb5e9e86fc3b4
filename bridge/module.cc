// The extension module: handlers as capsules for jax.ffi, plans, and what Python lends to the handlers.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "handler.h"
#include "interpreter.h"
#include "plan.h"
#include "torch_api.h"

namespace nb = nanobind;

namespace jax_mxfp4_moe {
namespace {

template <typename T>
nb::capsule Pointer(T* pointer) {
  return nb::capsule(reinterpret_cast<const void*>(pointer));
}

// What jax.ffi.register_ffi_type and register_ffi_target take, for one of XLA's platform names.
nb::dict HandlersOf(const std::string& platform) {
  for (const Handlers& handlers : kHandlers) {
    if (platform != handlers.platform) continue;
    const auto target = [&](XLA_FFI_Handler* execute) {
      nb::dict stages;
      stages["instantiate"] = Pointer(handlers.instantiate);
      stages["initialize"] = Pointer(handlers.initialize);
      stages["execute"] = Pointer(execute);
      return stages;
    };
    nb::dict type;
    type["type_id"] = Pointer(handlers.type_id);
    type["type_info"] = Pointer(handlers.type_info);
    nb::dict result;
    result["type"] = type;
    result["eager"] = target(handlers.eager);
    result["graph"] = target(handlers.graph);
    result["device_type"] = static_cast<int>(handlers.device_type);
    return result;
  }
  throw std::invalid_argument("no handlers for platform '" + platform + "': expected cpu, CUDA or ROCM");
}

Mode ModeOf(const std::string& name) {
  if (name == "torch") return Mode::kTorch;
  if (name == "pointers") return Mode::kPointers;
  if (name == "gil") return Mode::kGil;
  if (name == "noop") return Mode::kNoop;
  throw std::invalid_argument("no such mode: " + name);
}

PyObject* Owned(nb::handle object) { return object.is_none() ? nullptr : object.inc_ref().ptr(); }

std::vector<BufferSpec> Specs(nb::handle list) {
  std::vector<BufferSpec> specs;
  for (nb::handle item : list) {
    specs.push_back(BufferSpec::Make(nb::cast<std::string>(item[0]), nb::cast<std::vector<int64_t>>(item[1])));
  }
  return specs;
}

// The returned capsule is Python's share of the plan; executables hold theirs (rule 1).
nb::capsule MakePlan(int64_t id, std::string name, nb::handle run, nb::handle prepare, nb::handle inputs,
                     nb::handle results, bool has_workspace, const std::string& mode) {
  auto plan = std::make_shared<Plan>();
  plan->id = id;
  plan->name = std::move(name);
  plan->inputs = Specs(inputs);
  plan->results = Specs(results);
  plan->has_workspace = has_workspace;
  plan->mode = ModeOf(mode);
  plan->run = Owned(run);
  plan->prepare = Owned(prepare);
  AddPlan(plan);
  return nb::capsule(new PlanPtr(std::move(plan)), [](void* share) noexcept { delete static_cast<PlanPtr*>(share); });
}

// `api` is torch's DLPack exchange capsule or None; the rest are torch's C functions, GPU ones None in a CPU build.
// The two addresses are c10::GradMode's functions, or 0.
std::string BindTorch(nb::handle api, nb::handle from_dlpack, nb::handle is_grad_enabled, nb::handle set_grad_enabled,
                      uintptr_t grad_mode, uintptr_t set_grad_mode, nb::handle exchange_device, nb::handle current_stream, nb::handle set_stream,
                      nb::handle stream_key) {
  TorchApi bound;
  if (PyCapsule_IsValid(api.ptr(), "dlpack_exchange_api")) {
    auto* header = static_cast<const DLPackExchangeAPIHeader*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    while (header != nullptr && header->version.major != 1) header = header->prev_api;
    if (header != nullptr && header->version.minor >= 3) {  // the table's layout is that of 1.3 on
      bound.exchange = reinterpret_cast<const DLPackExchangeAPI*>(header);
    }
  }
  bound.from_dlpack = Owned(from_dlpack);
  bound.is_grad_enabled = Owned(is_grad_enabled);
  bound.set_grad_enabled = Owned(set_grad_enabled);
  if (grad_mode != 0 && set_grad_mode != 0) {
    bound.grad_mode = reinterpret_cast<bool (*)()>(grad_mode);
    bound.set_grad_mode = reinterpret_cast<void (*)(bool)>(set_grad_mode);
  }
  bound.exchange_device = Owned(exchange_device);
  bound.current_stream = Owned(current_stream);
  bound.set_stream = Owned(set_stream);
  bound.stream_key = Owned(stream_key);
  torch_api = bound;  // kept for the life of the process
  return bound.exchange != nullptr ? "exchange_api" : "capsule";
}

nb::dict ReadCounters() {
  nb::dict result;
  result["calls"] = counters.calls.load();
  result["retained_views"] = counters.retained_views.load();
  result["instantiated"] = counters.instantiated.load();
  result["initialized"] = counters.initialized.load();
  return result;
}

int64_t PlanCalls(nb::capsule share) { return (*static_cast<PlanPtr*>(share.data()))->calls.load(); }

// Lets no further call into Python and waits for those inside (rule 7). True if none is left.
bool Close(double timeout_seconds) {
  Entry::Close();
  nb::gil_scoped_release released;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  while (Entry::count() > 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace
}  // namespace jax_mxfp4_moe

NB_MODULE(_bridge, module) {
  using namespace jax_mxfp4_moe;
  nb::set_leak_warnings(false);  // plans live as long as executables, which XLA may keep to the very end
  module.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("dlpack_version") = nb::make_tuple(DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
  module.def("handlers", &HandlersOf, nb::arg("platform"));
  module.def("make_plan", &MakePlan, nb::arg("id"), nb::arg("name"), nb::arg("run"), nb::arg("prepare").none(),
             nb::arg("inputs"), nb::arg("results"), nb::arg("has_workspace"), nb::arg("mode"));
  module.def("plan_calls", &PlanCalls, nb::arg("plan"));
  module.def("bind_torch", &BindTorch, nb::arg("exchange_api").none(), nb::arg("from_dlpack"),
             nb::arg("is_grad_enabled"), nb::arg("set_grad_enabled"), nb::arg("grad_mode"), nb::arg("set_grad_mode"),
             nb::arg("exchange_device").none(), nb::arg("current_stream").none(), nb::arg("set_stream").none(),
             nb::arg("stream_key").none());
  module.def("set_error_formatter", [](nb::handle callable) { SetErrorFormatter(callable.ptr()); });
  module.def("counters", &ReadCounters);
  module.def("close", &Close, nb::arg("timeout_seconds"));
}
