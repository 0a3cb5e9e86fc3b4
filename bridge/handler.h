// The custom call's handlers: one body for every platform and for any number of buffers.
#pragma once

#include <atomic>
#include <cstdint>

#include "dlpack_header.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mxfp4_moe {

// What Python registers with XLA for one platform.
struct Handlers {
  const char* platform;       // XLA's name: "cpu", "CUDA" or "ROCM"
  DLDeviceType device_type;   // of the tensors that the plan sees
  XLA_FFI_TypeId* type_id;    // each platform's plugin numbers types itself, so each has its own state type
  const XLA_FFI_TypeInfo* type_info;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* eager;
  XLA_FFI_Handler* graph;     // with the command-buffer trait; on cpu the same as eager
};

extern const Handlers kHandlers[3];

struct Counters {
  std::atomic<int64_t> calls{0};           // of a plan's Python callable
  std::atomic<int64_t> retained_views{0};  // calls that failed because a view was kept
  std::atomic<int64_t> instantiated{0};
  std::atomic<int64_t> initialized{0};
};

inline Counters counters;

}  // namespace jax_mxfp4_moe
