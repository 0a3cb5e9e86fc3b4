// dlpack.h comes from the build environment: apache-tvm-ffi's copy, or the one inside an installed torch.
#pragma once

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#else
#include <ATen/dlpack.h>
#endif

static_assert(DLPACK_MAJOR_VERSION == 1 && DLPACK_MINOR_VERSION >= 3,
              "needs dlpack.h 1.3 or later with major version 1: set DLPACK_INCLUDE_DIR");
