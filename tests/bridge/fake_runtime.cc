// As much of a runtime as it takes to call a platform's handlers on a machine without that platform: one state, a device ordinal,
// a stream that is null, no buffers, and errors as text.
#include <cstdio>
#include <cstring>

#include "xla/ffi/api/c_api.h"

namespace {

struct Context {
  int ordinal;
  void* state;
};

struct Text {
  char text[4096];
};

Context* Of(XLA_FFI_ExecutionContext* ctx) { return reinterpret_cast<Context*>(ctx); }

XLA_FFI_Error* Create(XLA_FFI_Error_Create_Args* args) {
  auto* error = new Text;
  std::snprintf(error->text, sizeof(error->text), "%d: %s", static_cast<int>(args->errc), args->message);
  return reinterpret_cast<XLA_FFI_Error*>(error);
}

void GetMessage(XLA_FFI_Error_GetMessage_Args* args) { args->message = reinterpret_cast<Text*>(args->error)->text; }

void Destroy(XLA_FFI_Error_Destroy_Args* args) { delete reinterpret_cast<Text*>(args->error); }

XLA_FFI_Error* SetState(XLA_FFI_State_Set_Args* args) {
  Of(args->ctx)->state = args->state;
  return nullptr;
}

XLA_FFI_Error* GetState(XLA_FFI_State_Get_Args* args) {
  args->state = Of(args->ctx)->state;
  return nullptr;
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* GetOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = Of(args->ctx)->ordinal;
  return nullptr;
}

}  // namespace

// Writes the handler's error to `message`, or an empty text. `state` is written by INSTANTIATE and read by the other stages.
extern "C" void call_handler(XLA_FFI_Handler* handler, int stage, long long plan, const char* plan_name, int ordinal, void** state,
                             char* message, size_t size) {
  XLA_FFI_Api api = {};
  api.struct_size = sizeof(api);
  api.api_version = {sizeof(XLA_FFI_Api_Version), nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = Create;
  api.XLA_FFI_Error_GetMessage = GetMessage;
  api.XLA_FFI_Error_Destroy = Destroy;
  api.XLA_FFI_State_Set = SetState;
  api.XLA_FFI_State_Get = GetState;
  api.XLA_FFI_Stream_Get = GetStream;
  api.XLA_FFI_DeviceOrdinal_Get = GetOrdinal;

  XLA_FFI_Scalar id = {XLA_FFI_DataType_S64, &plan};
  XLA_FFI_ByteSpan name = {plan_name, std::strlen(plan_name)};
  XLA_FFI_ByteSpan keys[] = {{"plan", 4}, {"plan_name", 9}};
  XLA_FFI_ByteSpan* names[] = {&keys[0], &keys[1]};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_STRING};
  void* attrs[] = {&id, &name};

  Context context = {ordinal, *state};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&context);
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  if (stage == XLA_FFI_ExecutionStage_INSTANTIATE) {
    frame.attrs.size = 2;
    frame.attrs.types = types;
    frame.attrs.names = names;
    frame.attrs.attrs = attrs;
  }
  XLA_FFI_Error* error = handler(&frame);
  *state = context.state;
  std::snprintf(message, size, "%s", error == nullptr ? "" : reinterpret_cast<Text*>(error)->text);
  if (error != nullptr) delete reinterpret_cast<Text*>(error);
}

extern "C" void delete_state(const XLA_FFI_TypeInfo* type, void* state) { type->deleter(state); }
