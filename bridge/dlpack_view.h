// The buffers of one call as torch tensors, without a copy and without ownership (rules 1 to 4).
#pragma once

#include <Python.h>

#include <string>

#include "plan.h"

namespace jax_mxfp4_moe {

// The DLPack structs of one call. The call holds one reference to them and every imported struct another, so a view that
// outlives the call keeps its struct (not XLA's memory) alive until its deleter (rule 2). Without such a view they go
// back to the plan for its next call. Lock held throughout, except in deleters, which run anywhere.
class Views {
 public:
  Views(const PlanPtr& plan, DLDevice device);
  ~Views();
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  // Makes the tensor of buffer `index` (inputs first, then results); a new reference, or null with a Python error set.
  PyObject* Make(size_t index, void* data);

  // Names the buffers whose views are still alive, empty if none is. Call after the call's own tensors are dropped.
  std::string Retained() const;

 private:
  const PlanPtr& plan_;
  ViewBlock* block_;
  int own_;  // references that no struct has taken over yet, and the call's own
};

}  // namespace jax_mxfp4_moe
