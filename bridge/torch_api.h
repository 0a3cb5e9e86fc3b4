// What the bridge uses of torch, found by name at run time and never linked. Filled once by Python, read under the
// interpreter lock.
#pragma once

#include <Python.h>

#include "dlpack_header.h"

namespace jax_mxfp4_moe {

struct TorchApi {
  const DLPackExchangeAPI* exchange = nullptr;  // null: capsules through from_dlpack
  PyObject* from_dlpack = nullptr;              // torch._C._from_dlpack
  PyObject* is_grad_enabled = nullptr;          // torch.is_grad_enabled
  PyObject* set_grad_enabled = nullptr;         // torch._C._set_grad_enabled
  // c10::GradMode's two functions, where the loaded libc10 has them; else the two above, which are slower.
  bool (*grad_mode)() = nullptr;
  void (*set_grad_mode)(bool) = nullptr;
  // GPU builds of torch only:
  PyObject* exchange_device = nullptr;  // torch.cuda._exchange_device's C function: set, return the previous
  PyObject* current_stream = nullptr;   // torch._C._cuda_getCurrentStream(index) -> (id, index, type)
  PyObject* set_stream = nullptr;       // torch._C._cuda_setStream(id, index, type)
  PyObject* stream_key = nullptr;       // Python half: (pointer, index) -> (id, index, type)
};

inline TorchApi torch_api;

}  // namespace jax_mxfp4_moe
