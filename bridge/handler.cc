#include "handler.h"

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "dlpack_view.h"
#include "interpreter.h"
#include "plan.h"
#include "stream.h"

namespace jax_mxfp4_moe {
namespace {

using ffi::Error;
using ffi::ErrorCode;

enum class Platform { kCpu, kCuda, kRocm };
constexpr const char* kPlatformNames[] = {"cpu", "CUDA", "ROCM"};
constexpr DLDeviceType kDeviceTypes[] = {kDLCPU, kDLCUDA, kDLROCM};

// An executable's hold on its plan (rule 1). XLA owns it and deletes it with the executable.
template <Platform platform>
struct PlanState {
  inline static ffi::TypeId id{};
  PlanPtr plan;
};

// Where one call runs.
struct Place {
  int32_t ordinal = 0;
  void* stream = nullptr;
};

std::string Text(ffi::DataType dtype, const int64_t* dims, size_t rank) {
  std::ostringstream text;
  text << dtype << "[";
  for (size_t axis = 0; axis < rank; ++axis) text << (axis ? "," : "") << dims[axis];
  text << "]";
  return text.str();
}

Error Failed(ErrorCode code, const Plan& plan, std::string_view what) {
  return Error(code, "jax_mxfp4_moe: plan '" + plan.name + "': " + std::string(what));
}

// Checks one side of the frame against the plan, without Python. Fills the data pointers.
template <typename Frame>
Error CheckBuffers(const Plan& plan, const std::vector<BufferSpec>& specs, const char* side, const Frame& frame,
                   std::vector<void*>& data) {
  if (frame.size() != specs.size()) {
    return Failed(ErrorCode::kInvalidArgument, plan,
                  "given " + std::to_string(frame.size()) + " " + side + "s, expected " + std::to_string(specs.size()));
  }
  for (size_t index = 0; index < specs.size(); ++index) {
    auto decoded = frame.template get<ffi::AnyBuffer>(index);
    if (!decoded) return decoded.error();
    ffi::AnyBuffer buffer = [&] {
      if constexpr (std::is_same_v<Frame, ffi::RemainingArgs>) return *decoded;
      else return **decoded;
    }();
    ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
    const BufferSpec& spec = specs[index];
    if (buffer.element_type() != spec.dtype->xla || dims.size() != spec.dims.size() ||
        !std::equal(dims.begin(), dims.end(), spec.dims.begin())) {
      return Failed(ErrorCode::kInvalidArgument, plan,
                    std::string(side) + " " + std::to_string(index) + " is " +
                        Text(buffer.element_type(), dims.begin(), dims.size()) + ", expected " +
                        Text(spec.dtype->xla, spec.dims.data(), spec.dims.size()));
    }
    data.push_back(buffer.untyped_data());
  }
  return Error::Success();
}

// Runs `body` with the interpreter lock (rules 5 and 7).
template <typename Body>
Error InPython(const Plan& plan, Body body) {
  Entry entry;
  if (!entry.entered()) return Failed(ErrorCode::kCancelled, plan, "the Python interpreter is shutting down");
  Gil gil;
  DropPending();
  return body();
}

// Once for each plan and device, before the first run: never inside a stream capture (rule 8).
template <Platform platform>
Error Prepare(Plan& plan, int32_t ordinal) {
  return InPython(plan, [&] {
    DefaultFloatingPoint floating_point;
    Ref done(PyObject_CallFunction(plan.prepare, "is", ordinal, kPlatformNames[static_cast<int>(platform)]));
    if (!done) return Failed(ErrorCode::kInternal, plan, "preparing for a device failed\n" + TakeError());
    plan.prepared[ordinal].store(true, std::memory_order_release);
    return Error::Success();
  });
}

bool IsPrepared(const Plan& plan, int32_t ordinal) {
  return plan.prepare == nullptr || plan.prepared[ordinal].load(std::memory_order_acquire);
}

Error CheckOrdinal(const Plan& plan, int32_t ordinal) {
  if (ordinal >= 0 && ordinal < Plan::kMaxDevices) return Error::Success();
  return Failed(ErrorCode::kInvalidArgument, plan,
                "device ordinal " + std::to_string(ordinal) + ", expected 0 to " +
                    std::to_string(Plan::kMaxDevices - 1));
}

// Calls plan.run(inputs, outputs, workspace) on objects made by `make(index, data)`. The objects are dropped before
// this returns; an empty string means success.
template <typename Make>
std::string Run(Plan& plan, const std::vector<void*>& data, Make make) {
  const size_t num_inputs = plan.inputs.size();
  const size_t num_outputs = plan.results.size() - (plan.has_workspace ? 1 : 0);
  Ref inputs(PyList_New(static_cast<Py_ssize_t>(num_inputs)));
  Ref outputs(PyList_New(static_cast<Py_ssize_t>(num_outputs)));
  Ref workspace;
  bool made = inputs && outputs;
  for (size_t index = 0; made && index < data.size(); ++index) {
    PyObject* object = make(index, data[index]);
    made = object != nullptr;
    if (!made) break;
    if (index < num_inputs) {
      PyList_SET_ITEM(inputs.get(), static_cast<Py_ssize_t>(index), object);
    } else if (index < num_inputs + num_outputs) {
      PyList_SET_ITEM(outputs.get(), static_cast<Py_ssize_t>(index - num_inputs), object);
    } else {
      workspace = Ref(object);
    }
  }
  std::string error;
  if (made) {
    counters.calls.fetch_add(1, std::memory_order_relaxed);
    plan.calls.fetch_add(1, std::memory_order_relaxed);
    PyObject* arguments[] = {inputs.get(), outputs.get(), workspace ? workspace.get() : Py_None};
    Ref done(PyObject_Vectorcall(plan.run, arguments, 3, nullptr));
    if (!done) error = "its Python callable raised\n" + TakeError();
  } else {
    error = "making the tensors failed\n" + TakeError();
  }
  // The callable may have kept the lists: empty them, so that only a kept tensor counts as a kept view (rule 2).
  for (const Ref* list : {&inputs, &outputs}) {
    if (*list && Py_REFCNT(list->get()) > 1 && PyList_SetSlice(list->get(), 0, PyList_GET_SIZE(list->get()), nullptr) != 0) {
      PyErr_Clear();
    }
  }
  return error;
}

template <Platform platform>
ffi::ErrorOr<std::unique_ptr<PlanState<platform>>> Instantiate(int64_t id, std::string_view name) {
  PlanPtr plan = FindPlan(id);
  if (plan == nullptr) {
    return ffi::Unexpected(Error(
        ErrorCode::kFailedPrecondition,
        "jax_mxfp4_moe: this program calls plan '" + std::string(name) + "' (id " + std::to_string(id) +
            "), which this process has not built or no longer keeps. Programs that were compiled or exported in another "
            "process carry only the plan's id: trace the function again in this process (a persistent compilation "
            "cache still serves the compiled code)."));
  }
  counters.instantiated.fetch_add(1, std::memory_order_relaxed);
  return std::make_unique<PlanState<platform>>(PlanState<platform>{std::move(plan)});
}

template <Platform platform>
Error Initialize(PlanState<platform>* state, Place place) {
  Plan& plan = *state->plan;
  if (Error error = CheckOrdinal(plan, place.ordinal); error.failure()) return error;
  counters.initialized.fetch_add(1, std::memory_order_relaxed);
  return IsPrepared(plan, place.ordinal) ? Error::Success() : Prepare<platform>(plan, place.ordinal);
}

template <Platform platform>
Error Execute(PlanState<platform>* state, Place place, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Plan& plan = *state->plan;
  if (Error error = CheckOrdinal(plan, place.ordinal); error.failure()) return error;
  if (!IsPrepared(plan, place.ordinal)) {  // XLA's cpu runtime has no INITIALIZE; on a GPU it comes before any capture
    if (platform != Platform::kCpu) {
      return Failed(ErrorCode::kFailedPrecondition, plan,
                    "the runtime did not run INITIALIZE before EXECUTE on device " + std::to_string(place.ordinal) +
                        ", expected a plan that is warm there: the stream may be recording, where no kernel can be loaded "
                        "and nothing allocated. Use a jaxlib that initializes custom calls, or bridge='callback'.");
    }
    if (Error error = Prepare<platform>(plan, place.ordinal); error.failure()) return error;
  }
  std::vector<void*> data;
  data.reserve(plan.inputs.size() + plan.results.size());
  if (Error error = CheckBuffers(plan, plan.inputs, "input", args, data); error.failure()) return error;
  if (Error error = CheckBuffers(plan, plan.results, "result", rets, data); error.failure()) return error;
  if (plan.mode == Mode::kNoop) return Error::Success();

  return InPython(plan, [&] {
    if (plan.mode == Mode::kGil) return Error::Success();
    DefaultFloatingPoint floating_point;  // rule 9
    std::string error;
    if (plan.mode == Mode::kPointers) {
      error = Run(plan, data, [](size_t, void* pointer) { return PyLong_FromVoidPtr(pointer); });
      return error.empty() ? Error::Success() : Failed(ErrorCode::kInternal, plan, error);
    }
    NoGrad no_grad;
    if (no_grad.failed()) return Failed(ErrorCode::kInternal, plan, TakeError());
    std::optional<DeviceAndStream> device_and_stream;  // rule 8
    if constexpr (platform != Platform::kCpu) {
      device_and_stream.emplace(place.ordinal, place.stream);
      if (device_and_stream->failed()) return Failed(ErrorCode::kInternal, plan, TakeError());
    }
    Views views(state->plan, DLDevice{kDeviceTypes[static_cast<int>(platform)], place.ordinal});
    error = Run(plan, data, [&](size_t index, void* pointer) { return views.Make(index, pointer); });
    if (!error.empty()) return Failed(ErrorCode::kInternal, plan, error);
    std::string retained = views.Retained();  // rule 2
    if (retained.empty()) return Error::Success();
    counters.retained_views.fetch_add(1, std::memory_order_relaxed);
    return Failed(ErrorCode::kInternal, plan,
                  "its Python callable kept a view of " + retained +
                      ". These buffers are XLA's and are reused after the call: copy what must outlive it.");
  });
}

// What XLA calls. Nothing that `body` throws leaves (rule 10).
template <typename Body>
auto NoThrow(Body body) -> decltype(body()) {
  const auto failed = [](const char* what) {
    Error error(ErrorCode::kInternal, std::string("jax_mxfp4_moe: ") + what);
    if constexpr (std::is_same_v<decltype(body()), Error>) return error;
    else return ffi::Unexpected(std::move(error));
  };
  try {
    return body();
  } catch (const std::exception& error) {
    return failed(error.what());
  } catch (...) {
    return failed("an unknown C++ exception");
  }
}

template <Platform platform>
XLA_FFI_Error* OnInstantiate(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInstantiate()
                             .Attr<int64_t>("plan")
                             .Attr<std::string_view>("plan_name")
                             .To([](int64_t id, std::string_view name) {
                               return NoThrow([&] { return Instantiate<platform>(id, name); });
                             })
                             .release();
  return handler->Call(frame);
}

// The two bindings: a cpu has neither stream nor ordinal, everything else is the same.
template <Platform platform>
XLA_FFI_Error* OnInitialize(XLA_FFI_CallFrame* frame) {
  using State = PlanState<platform>;
  if constexpr (platform == Platform::kCpu) {
    static auto* handler = ffi::Ffi::BindInitialize()
                               .Ctx<ffi::State<State>>()
                               .To([](State* state) { return NoThrow([&] { return Initialize(state, Place{}); }); })
                               .release();
    return handler->Call(frame);
  } else {
    static auto* handler = ffi::Ffi::BindInitialize()
                               .Ctx<ffi::DeviceOrdinal>()
                               .Ctx<ffi::State<State>>()
                               .To([](int32_t ordinal, State* state) {
                                 return NoThrow([&] { return Initialize(state, Place{ordinal, nullptr}); });
                               })
                               .release();
    return handler->Call(frame);
  }
}

template <Platform platform, bool graph>
XLA_FFI_Error* OnExecute(XLA_FFI_CallFrame* frame) {
  using State = PlanState<platform>;
  if constexpr (platform == Platform::kCpu) {
    static auto* handler = ffi::Ffi::BindExecute()
                               .Ctx<ffi::State<State>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .To([](State* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
                                 return NoThrow([&] { return Execute(state, Place{}, args, rets); });
                               })
                               .release();
    return handler->Call(frame);
  } else {
    const auto execute = [](int32_t ordinal, void* stream, State* state, ffi::RemainingArgs args,
                            ffi::RemainingRets rets) {
      return NoThrow([&] { return Execute(state, Place{ordinal, stream}, args, rets); });
    };
    const auto bind = [&](std::initializer_list<ffi::Traits> traits) {
      return ffi::Ffi::BindExecute()
          .Ctx<ffi::DeviceOrdinal>()
          .Ctx<ffi::PlatformStream<void*>>()
          .Ctx<ffi::State<State>>()
          .RemainingArgs()
          .RemainingRets()
          .To(execute, traits)
          .release();
    };
    static auto* handler = graph ? bind({ffi::Traits::kCmdBufferCompatible}) : bind({});
    return handler->Call(frame);
  }
}

template <Platform platform>
constexpr XLA_FFI_TypeInfo kTypeInfo = ffi::MakeTypeInfo<PlanState<platform>>();

template <Platform platform>
Handlers Make() {
  constexpr auto index = static_cast<int>(platform);
  Handlers handlers;
  handlers.platform = kPlatformNames[index];
  handlers.device_type = kDeviceTypes[index];
  handlers.type_id = &PlanState<platform>::id;
  handlers.type_info = &kTypeInfo<platform>;
  handlers.instantiate = OnInstantiate<platform>;
  handlers.initialize = OnInitialize<platform>;
  handlers.eager = OnExecute<platform, false>;
  handlers.graph = OnExecute<platform, platform != Platform::kCpu>;
  return handlers;
}

}  // namespace

const Handlers kHandlers[3] = {Make<Platform::kCpu>(), Make<Platform::kCuda>(), Make<Platform::kRocm>()};

}  // namespace jax_mxfp4_moe
