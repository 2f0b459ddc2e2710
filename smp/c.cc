// SPDX-License-Identifier: Apache-2.0
#include "smp/c.h"

#include <ATen/core/grad_mode.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "runtime/session/session.h"
#include "smp/c/call.h"
#include "smp/c/callers_memory.h"
#include "smp/c/session.h"
#include "smp/c/tensors.h"
#include "smp/group.h"
#include "smp/save_load.h"

struct smp_session {
  explicit smp_session(std::unique_ptr<smp::c::Session> s) : session(std::move(s)) {}

  mutable std::atomic<bool> busy{false};
  std::atomic<bool> is_alive{true};
  std::string cause;  // cause of its end
  std::unique_ptr<smp::c::Session> session;
};

struct smp_model {
  std::atomic<bool> busy{false};
  std::shared_ptr<smp::c::Program> program;
};

namespace smp::c {
namespace {

std::string text_or_empty(const char* text) { return text == nullptr ? "" : text; }

const char* needed(const char* text, const char* what) {
  SMP_CHECK_WITH(UsageError, text != nullptr, "the ", what,
                 " is NULL. Pass a text that ends with 0");
  return text;
}

template <class T>
T& place(T* pointer, const char* what) {
  SMP_CHECK_WITH(UsageError, pointer != nullptr, "the place for the ", what,
                 " is NULL. Pass an address");
  return *pointer;
}

/// A rank whose call fails has left the others waiting in theirs.
smp_code end_session(smp_session& session, smp_code code) {
  session.cause = last_error();
  session.is_alive = false;
  session.session->fail(session.cause);
  return set_error(code,
                   session.cause + "\nThe session has ended on all its ranks; smp_close frees it.");
}

/// Runs `body` on a session that is alive, and `on_error` with the code where it throws.
template <class Body, class OnError>
smp_code call(const smp_session* handle, Body&& body, OnError&& on_error) noexcept {
  try {
    if (handle == nullptr) return set_error(SMP_ERROR_USAGE, "the session is NULL");
    const Entry entry(handle->busy);
    entry.check();
    if (!handle->is_alive) {
      return set_error(SMP_ERROR_ENDED,
                       "the session has ended by an earlier error; smp_close frees "
                       "it. That was: " +
                           handle->cause);
    }
    const smp_code code = run([&](const MaskedTraps& masked) {
      const runtime::SessionScope here(handle->session->ranks());
      body(masked);
    });
    return code == SMP_OK ? code : on_error(code);
  } catch (...) {
    return code_of_exception();
  }
}

/// A call that all ranks make.
template <class Body>
smp_code call_together(smp_session* handle, Body&& body) noexcept {
  return call(handle, body, [&](smp_code code) { return end_session(*handle, code); });
}

/// The same where errors of files are those of all ranks, and change nothing.
template <class Body>
smp_code call_on_files(smp_session* handle, Body&& body) noexcept {
  return call(handle, body, [&](smp_code code) {
    return code == SMP_ERROR_CHECKPOINT ? code : end_session(*handle, code);
  });
}

/// A call of one rank.
template <class Body>
smp_code call_alone(const smp_session* handle, Body&& body) noexcept {
  return call(handle, body, [](smp_code code) { return code; });
}

template <class Body>
smp_code call_model(smp_model* handle, Body&& body) noexcept {
  try {
    if (handle == nullptr) return set_error(SMP_ERROR_USAGE, "the model is NULL");
    const Entry entry(handle->busy);
    entry.check();
    return run(body);
  } catch (...) {
    return code_of_exception();
  }
}

int open_session(const char* config, const std::optional<int64_t>& communicator,
                 smp_session** session) {
  return run([&](const MaskedTraps&) {
    if (session != nullptr) *session = nullptr;
    // Other ranks are waiting, and have to know of an error here, too.
    const auto read = [&] {
      place(session, "session");
      return read_config(config);
    };
    auto begun = std::make_unique<Session>(read, communicator);
    *session = new smp_session(std::move(begun));
  });
}

/// Frees a handle, unless it is in a call.
template <class Handle, class End>
smp_code close(Handle* handle, const End& end) noexcept {
  if (handle == nullptr) return SMP_OK;
  try {
    Entry(handle->busy).check();
  } catch (...) {
    return code_of_exception();
  }
  return end(std::unique_ptr<Handle>(handle));
}

at::Tensor target_of(const smp_tensor* target, at::Device device) {
  return target == nullptr ? at::Tensor() : read_tensor(*target, "the target", device);
}

/// Calls the caller's function in the place of a C++ one, with structures of `size` bytes.
OutputGradient gradient_of(smp_gradient_callback callback, void* context, int64_t size,
                           const MaskedTraps& masked) {
  SMP_CHECK_WITH(UsageError, callback != nullptr,
                 "the function that gives gradients is NULL. Pass one");
  return [callback, context, size, &masked](int microbatch, const std::vector<at::Tensor>& outputs,
                                            const std::vector<at::Tensor>& gradients) {
    DescribedArray given(outputs, size), asked(gradients, size);
    int result = 0;
    {
      const Callback here(masked);
      result = callback(context, microbatch, given.data(), asked.data(),
                        static_cast<int64_t>(outputs.size()));
    }
    SMP_CHECK_WITH(UsageError, result == 0, "the function that gives gradients has returned ",
                   result, " for microbatch ", microbatch, ", and so has failed");
  };
}

}  // namespace
}  // namespace smp::c

using namespace smp::c;  // NOLINT(google-build-using-namespace)

int smp_c_version(void) { return SMP_C_VERSION; }

const char* smp_last_error(void) { return last_error(); }

int smp_set_threads(int64_t threads) {
  return run([&](const MaskedTraps&) {
    SMP_CHECK_WITH(smp::UsageError, threads >= 1 && threads <= 1024, threads,
                   " is no number of threads: expected 1 to 1024");
    KernelThreads::choose(static_cast<int>(threads));
  });
}

int smp_open(const char* config, smp_session** session) {
  return open_session(config, std::nullopt, session);
}

int smp_open_mpi(const char* config, int64_t communicator, smp_session** session) {
  return open_session(config, communicator, session);
}

int smp_close(smp_session* session) {
  return close(session, [](std::unique_ptr<smp_session> owned) {
    const smp_code code = run([&](const MaskedTraps&) { owned->session->end(); });
    return owned->is_alive ? code : SMP_OK;
  });
}

int smp_is_alive(const smp_session* session) {
  return session != nullptr && session->is_alive ? 1 : 0;
}

int smp_rank(const smp_session* session, int64_t* rank, int64_t* size) {
  return call_alone(session, [&](const MaskedTraps&) {
    place(rank, "rank") = smp::rank();
    place(size, "number of ranks") = smp::size();
  });
}

int smp_replica(const smp_session* session, int64_t* replica, int64_t* replicas) {
  return call_alone(session, [&](const MaskedTraps&) {
    place(replica, "replica") = smp::dp_rank();
    place(replicas, "number of replicas") = smp::dp_size();
  });
}

int smp_set_device(smp_session* session, int32_t device, int32_t device_index) {
  return call_alone(session, [&](const MaskedTraps&) {
    session->session->set_device(device_of(device, device_index, "the session"));
  });
}

int smp_load(smp_session* session, const char* train, const char* eval) {
  return call_together(session, [&](const MaskedTraps&) {
    session->session->load(text_or_empty(train), text_or_empty(eval));
  });
}

int smp_optimizer(smp_session* session, const char* name, const char* options) {
  return call_together(session, [&](const MaskedTraps&) {
    session->session->make_optimizer(needed(name, "name of the optimizer"), text_or_empty(options));
  });
}

int smp_set_learning_rate(smp_session* session, double rate) {
  return call_alone(session,
                    [&](const MaskedTraps&) { session->session->set_learning_rate(rate); });
}

int smp_loss_scale(const smp_session* session, double* scale, int64_t* skipped) {
  return call_alone(session, [&](const MaskedTraps&) {
    const auto& optimizer = *session->session->optimizer().core;
    place(scale, "loss scale") = optimizer.loss_scale();
    place(skipped, "number of skipped steps") = optimizer.overflow() ? 1 : 0;
  });
}

int smp_train(smp_session* session, const smp_tensor* inputs, int64_t count, const char* loss_name,
              const smp_tensor* target, double* loss) {
  const CallersMemory memory(inputs, count, target);
  return call_together(session, [&](const MaskedTraps&) {
    const at::Device device = session->session->device();
    const double value =
        session->session->train(read_tensors(inputs, count, "input", device),
                                needed(loss_name, "name of the loss"), target_of(target, device));
    memory.wait_for_gpus();
    if (loss != nullptr) *loss = value;
  });
}

int smp_train_by_gradient(smp_session* session, const smp_tensor* inputs, int64_t count,
                          smp_gradient_callback callback, void* context) {
  const CallersMemory memory(inputs, count);
  return call_together(session, [&](const MaskedTraps& masked) {
    NamedTensors read = read_tensors(inputs, count, "input", session->session->device());
    const int64_t size = count > 0 ? inputs->struct_size : kSize;
    session->session->train_by_gradient(std::move(read),
                                        gradient_of(callback, context, size, masked));
    memory.wait_for_gpus();
  });
}

int smp_evaluate(smp_session* session, const smp_tensor* inputs, int64_t count,
                 const char* loss_name, const smp_tensor* target, double* loss, smp_tensor* outputs,
                 int64_t output_count) {
  const CallersMemory memory(inputs, count, target, outputs, output_count);
  return call_together(session, [&](const MaskedTraps&) {
    const at::Device device = session->session->device();
    const auto name = loss_name == nullptr ? std::nullopt : std::optional<std::string>(loss_name);
    const auto evaluated = session->session->evaluate(read_tensors(inputs, count, "input", device),
                                                      name, target_of(target, device));
    write_tensors(evaluated.first, outputs, output_count);
    memory.wait_for_gpus();
    if (loss != nullptr) *loss = evaluated.second;
  });
}

int smp_save(smp_session* session, const char* folder, const char* tag) {
  return call_on_files(session, [&](const MaskedTraps&) {
    session->session->save(needed(folder, "folder"), needed(tag, "tag"));
  });
}

int smp_save_weights(smp_session* session, const char* folder, const char* tag) {
  return call_on_files(session, [&](const MaskedTraps&) {
    session->session->save_weights(needed(folder, "folder"), needed(tag, "tag"));
  });
}

int smp_save_program(smp_session* session, const char* program, const char* path) {
  return call_on_files(session, [&](const MaskedTraps&) {
    session->session->save_program(text_or_empty(program), needed(path, "path"));
  });
}

int smp_resume(smp_session* session, const char* folder, const char* tag, int64_t* steps) {
  return call_on_files(session, [&](const MaskedTraps&) {
    const auto named = tag == nullptr ? std::nullopt : std::optional<std::string>(tag);
    place(steps, "number of steps") = session->session->resume(needed(folder, "folder"), named);
  });
}

int smp_gather_state(smp_session* session, int64_t* count) {
  return call_together(session, [&](const MaskedTraps&) {
    session->session->gather_state();
    place(count, "number of tensors") = static_cast<int64_t>(session->session->state().size());
  });
}

int smp_state(const smp_session* session, int64_t index, smp_tensor* tensor) {
  return call_alone(session, [&](const MaskedTraps&) {
    const auto& state = session->session->state();
    SMP_CHECK_WITH(smp::UsageError, index >= 0 && index < static_cast<int64_t>(state.size()),
                   "there is no tensor ", index, ": smp_gather_state has gathered ", state.size());
    const auto& [name, value] = state[static_cast<size_t>(index)];
    smp_tensor described = describe(value);
    described.name = name.c_str();
    store(described, tensor);
  });
}

int smp_model_open(const char* program, smp_model** model) {
  return run([&](const MaskedTraps&) {
    smp_model*& result = place(model, "model");
    result = nullptr;
    auto made = std::make_unique<smp_model>();
    made->program = load_for_inference(needed(program, "name of the program"));
    result = made.release();
  });
}

int smp_model_load(smp_model* model, const char* checkpoint) {
  return call_model(model, [&](const MaskedTraps&) {
    smp::load_into_module(needed(checkpoint, "name of the checkpoint"), *model->program);
  });
}

int smp_model_run(smp_model* model, const smp_tensor* inputs, int64_t count, smp_tensor* outputs,
                  int64_t output_count) {
  const CallersMemory memory(inputs, count, nullptr, outputs, output_count);
  return call_model(model, [&](const MaskedTraps&) {
    const at::NoGradGuard no_grad;
    const NamedTensors read = read_tensors(inputs, count, "input", at::kCPU);
    write_tensors(model->program->forward(read.tensors, read.names), outputs, output_count);
    memory.wait_for_gpus();
  });
}

int smp_model_close(smp_model* model) {
  return close(model, [](std::unique_ptr<smp_model> owned) {
    return run([&](const MaskedTraps&) { owned = nullptr; });
  });
}
