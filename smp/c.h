// SPDX-License-Identifier: Apache-2.0
#pragma once

/*
 * The interface for C, and for languages that call C: Fortran, Julia, C#. It trains and runs models
 * that Python has written by torch.export, on one process or on the ranks of the caller's MPI
 * communicator. docs/c.md has the whole of it with examples.
 *
 * Calls. Each returns an smp_code; smp_last_error() has the text of the last failed call of the
 * thread. No exception leaves a call, and no call ends the process, starts or ends MPI or changes
 * its error handlers. A session is used by one thread at a time: a second one gets SMP_ERROR_BUSY.
 * Calls have the default floating-point environment, without traps, as libtorch's kernels expect,
 * and give the caller's back. Memory of outputs overlaps no other memory of the call.
 *
 * Collective calls are made by all ranks of a session, in the same order. An error of one of them
 * ends the session on all its ranks: the others' calls return SMP_ERROR_COMM, later ones
 * SMP_ERROR_ENDED, and smp_close is what remains. Only SMP_ERROR_CHECKPOINT, of smp_save,
 * smp_save_weights and smp_resume, is the same on all ranks and leaves the session as it was.
 * smp_is_alive says which it is.
 *
 * Structures begin with struct_size, which the caller sets to sizeof of the structure: a program
 * that was compiled with an older header works with a newer library.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of this header. Numbers, functions and members of a version stay in later ones. */
#define SMP_C_VERSION 1

/** The most dimensions of a tensor. */
#define SMP_MAX_DIMS 8

#define SMP_C_API __attribute__((visibility("default")))

/** The result of a call. */
typedef enum smp_code {
  SMP_OK = 0,
  SMP_ERROR_CONFIG = 1,     /**< The configuration is wrong, or an optimizer's options. */
  SMP_ERROR_USAGE = 2,      /**< The call, or its arguments, are not allowed here. */
  SMP_ERROR_CAPTURE = 3,    /**< The program does something that cannot be divided. */
  SMP_ERROR_PARTITION = 4,  /**< There is no partition that fits. */
  SMP_ERROR_COMM = 5,       /**< Another rank has failed or cannot be reached. */
  SMP_ERROR_TIMEOUT = 6,    /**< Other ranks have not come in time. */
  SMP_ERROR_CHECKPOINT = 7, /**< A file is missing or damaged, or does not fit. */
  SMP_ERROR_CORRUPTION = 8, /**< Ranks computed other bits from the same numbers. */
  SMP_ERROR_BUSY = 9,       /**< Another thread is in a call with this handle. */
  SMP_ERROR_ENDED = 10,     /**< The session has ended by an earlier error. */
  SMP_ERROR_MEMORY = 11,    /**< There is not enough memory. */
  SMP_ERROR_OTHER = 12      /**< libtorch or the system has failed. */
} smp_code;

/** Types of elements. */
typedef enum smp_dtype {
  SMP_FLOAT32 = 1,
  SMP_FLOAT64 = 2,
  SMP_INT32 = 3,
  SMP_INT64 = 4,
  SMP_INT16 = 5,
  SMP_INT8 = 6,
  SMP_UINT8 = 7,
  SMP_BOOL = 8,
  SMP_FLOAT16 = 9,
  SMP_BFLOAT16 = 10
} smp_dtype;

/** The order of a tensor's elements in memory. */
typedef enum smp_layout {
  SMP_ROW_MAJOR = 0,    /**< The last index varies fastest, as in C. */
  SMP_COLUMN_MAJOR = 1, /**< The first index varies fastest, as in Fortran. */
  SMP_STRIDED = 2       /**< `strides` are given. */
} smp_layout;

/** A tensor on memory of the caller, in host memory. A call borrows it until it returns. */
typedef struct smp_tensor {
  int64_t struct_size;           /**< sizeof(smp_tensor) */
  int32_t dtype;                 /**< an smp_dtype */
  int32_t layout;                /**< an smp_layout */
  int64_t dims;                  /**< 0 to SMP_MAX_DIMS */
  int64_t sizes[SMP_MAX_DIMS];   /**< x(i, j) has the same sizes in any layout. */
  int64_t strides[SMP_MAX_DIMS]; /**< elements between neighbours, for SMP_STRIDED */
  void* data;                    /**< the element of index 0, 0, ... */
  const char* name;              /**< name of an input that is given by it; else NULL */
} smp_tensor;

/** A session: a configuration, ranks, a model and its optimizer. One at a time in a process. */
typedef struct smp_session smp_session;

/** A model that is only run, without a session. */
typedef struct smp_model smp_model;

/**
 * Gives the gradients of a microbatch's outputs: a sum over microbatches is made of what they lead
 * to, and divided by their number. `outputs` are those of the model that need a gradient, in their
 * order, `gradients` as many tensors of the same sizes and types to be filled in; both are
 * contiguous (SMP_ROW_MAJOR) and end with the call. `microbatch` counts from 0 in each call of
 * smp_train_by_gradient. Another result than 0 is an error, which ends the session. It is called on
 * the thread of that call, with the caller's floating-point traps, on the ranks of the last stage
 * of the pipeline only, and must not call functions of this header.
 */
typedef int (*smp_gradient_callback)(void* context, int64_t microbatch, const smp_tensor* outputs,
                                     smp_tensor* gradients, int64_t count);

/** The version of the library's header: at least the program's SMP_C_VERSION, or it is too old. */
SMP_C_API int smp_c_version(void);

/** The text of the last call of this thread that failed; valid until its next one fails. */
SMP_C_API const char* smp_last_error(void);

/** Sets how many threads the kernels of this process use: equal bits need equal numbers. */
SMP_C_API int smp_set_threads(int64_t threads);

/**
 * Begins a session on this process alone. `config` is a configuration as JSON text (beginning with
 * '{'), or the name of such a file; NULL for the defaults. docs/configuration.md
 */
SMP_C_API int smp_open(const char* config, smp_session** session);

/**
 * Begins a session whose ranks are the processes of `communicator`, an MPI communicator by its
 * Fortran handle: MPI_Comm_c2f(comm) in C. Collective over it; blocks until all have come. MPI has
 * been started by the caller, with any thread level, and must outlive the session. It is used by
 * this call only: for one collective on a copy of the communicator, on this thread.
 */
SMP_C_API int smp_open_mpi(const char* config, int64_t communicator, smp_session** session);

/** Ends a session and frees it, also one that an error has ended; collective. NULL: nothing. */
SMP_C_API int smp_close(smp_session* session);

/** 1 while the session can go on, 0 when an error has ended it. */
SMP_C_API int smp_is_alive(const smp_session* session);

/** This rank among those of the session, and their number. */
SMP_C_API int smp_rank(const smp_session* session, int64_t* rank, int64_t* size);

/**
 * The share of the batch that this rank gives: replica `replica` of `replicas`. The ranks of one
 * pipeline are of one replica, and give the same tensors.
 */
SMP_C_API int smp_replica(const smp_session* session, int64_t* replica, int64_t* replicas);

/**
 * Loads the model of the session, once: the program that Python exported in training mode, the one
 * it exported in evaluation mode, or both; NULL for none. Collective.
 */
SMP_C_API int smp_load(smp_session* session, const char* train, const char* eval);

/**
 * Makes the optimizer, once, after smp_load: "sgd", "adam", "adamw", "adagrad" or "rmsprop" as in
 * libtorch, or "fused_sgd", "fused_adam", "fused_adamw", "fused_adagrad" with its fused kernels.
 * `options` are JSON text by libtorch's names, such as {"lr": 1e-3, "betas": [0.9, 0.95]}, and
 * "clip_grad_norm", the norm to which all gradients are clipped; NULL for defaults. Collective.
 */
SMP_C_API int smp_optimizer(smp_session* session, const char* name, const char* options);

/** Sets the learning rate from now on, the same on all ranks. */
SMP_C_API int smp_set_learning_rate(smp_session* session, double rate);

/**
 * One step of training: gradients of the loss, and an update of the optimizer. `inputs` are those
 * of Python's forward, all of one batch, which is cut into microbatches along the first dimension.
 * The loss is that of torch.nn.functional with its defaults: "mse", "l1", "smooth_l1", "huber",
 * "cross_entropy", "nll" or "bce_with_logits" of the model's first output and `target`; or
 * "output", the model's first output itself, with a NULL target. `loss` gets the mean over all
 * microbatches of all replicas; may be NULL. Collective.
 */
SMP_C_API int smp_train(smp_session* session, const smp_tensor* inputs, int64_t count,
                        const char* loss_name, const smp_tensor* target, double* loss);

/** The same with gradients of the model's outputs that `callback` gives, in place of a loss. */
SMP_C_API int smp_train_by_gradient(smp_session* session, const smp_tensor* inputs, int64_t count,
                                    smp_gradient_callback callback, void* context);

/**
 * Runs the model in evaluation mode, without gradients. `outputs` are what it returns, in order,
 * each for the whole batch of this replica: the caller's memory, or with `data` NULL nothing but
 * dtype and sizes, which the call fills in. `loss` as in smp_train; a NULL name for none.
 * Collective.
 */
SMP_C_API int smp_evaluate(smp_session* session, const smp_tensor* inputs, int64_t count,
                           const char* loss_name, const smp_tensor* target, double* loss,
                           smp_tensor* outputs, int64_t output_count);

/**
 * Saves model, optimizer, random streams and the number of steps as the checkpoint `tag` in
 * `folder`. Collective; the ranks share a file system.
 */
SMP_C_API int smp_save(smp_session* session, const char* folder, const char* tag);

/**
 * Saves the model alone as one file, folder/tag/model.safetensors, which smp_model_load and Python
 * read. Collective.
 */
SMP_C_API int smp_save_weights(smp_session* session, const char* folder, const char* tag);

/**
 * Goes on from the checkpoint `tag` of smp_save, on any number of ranks; NULL: the newest of
 * `folder`. `steps` gets the training steps done: 0 where there is no checkpoint of that name, and
 * then nothing has changed. After smp_load and smp_optimizer. Collective.
 */
SMP_C_API int smp_resume(smp_session* session, const char* folder, const char* tag, int64_t* steps);

/**
 * Gathers copies of all parameters and buffers on all ranks; `count` gets their number. Collective.
 */
SMP_C_API int smp_gather_state(smp_session* session, int64_t* count);

/**
 * The index-th tensor that smp_gather_state has gathered, from 0 on. Its `data` and `name` are the
 * library's, until the next smp_gather_state or the end of the session. Not collective.
 */
SMP_C_API int smp_state(const smp_session* session, int64_t index, smp_tensor* tensor);

/** Loads a program that Python exported in evaluation mode, to run it; needs no session. */
SMP_C_API int smp_model_open(const char* program, smp_model** model);

/** Gives the model the weights of a checkpoint, folder/tag of smp_save or smp_save_weights. */
SMP_C_API int smp_model_load(smp_model* model, const char* checkpoint);

/** Runs the model, without gradients. Inputs and outputs as in smp_evaluate. */
SMP_C_API int smp_model_run(smp_model* model, const smp_tensor* inputs, int64_t count,
                            smp_tensor* outputs, int64_t output_count);

/** Frees the model. NULL: nothing. */
SMP_C_API int smp_model_close(smp_model* model);

#ifdef __cplusplus
}
#endif
