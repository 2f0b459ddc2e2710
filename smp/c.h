// SPDX-License-Identifier: Apache-2.0
#pragma once

/*
 * The interface for C, and for languages that call C: Fortran, Julia, C#. It trains and runs models
 * that Python has written by torch.export, on one process or on the ranks of the caller's MPI
 * communicator. docs/c.md has the whole of it with examples.
 *
 * Calls. Each returns an smp_code; smp_last_error() has the text of the last failed call of the
 * thread. No exception leaves a call, and no call ends the process, starts or ends MPI or changes
 * its error handlers. Calls have the default floating-point environment, without traps, as
 * libtorch's kernels expect, and give the caller's back, as they do with OpenMP's number of
 * threads. Memory of outputs overlaps no other memory of the call.
 *
 * Sessions. A process may have several at the same time, of the same ranks or of others, which know
 * nothing of each other: an error ends its own only. A session is used by one thread at a time: a
 * second one gets SMP_ERROR_BUSY. Several threads may each use a session of their own; a thread
 * that uses several makes their calls in the same order as the other ranks' threads do.
 *
 * Collective calls are made by all ranks of a session, in the same order. An error of one of them
 * ends the session on all its ranks: the others' calls return SMP_ERROR_COMM, later ones
 * SMP_ERROR_ENDED, and smp_close is what remains. Only SMP_ERROR_CHECKPOINT, of smp_save,
 * smp_save_weights, smp_save_program and smp_resume, is the same on all ranks and leaves the
 * session as it was. smp_is_alive says which it is.
 *
 * Structures begin with struct_size, which the caller sets to sizeof of the structure: a program
 * that was compiled with an older header works with a newer library. Members that a call does not
 * name are 0.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The version of this header. Numbers, functions and members of a version stay in later ones.
 * Version 2 has added devices and DLPack to smp_tensor, smp_set_device, smp_loss_scale, the loss
 * scale's options of smp_optimizer, smp_save_program, and several sessions at the same time.
 */
#define SMP_C_VERSION 2

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

/** Kinds of memory. */
typedef enum smp_device {
  SMP_CPU = 0, /**< The host's memory. */
  SMP_GPU = 1  /**< That of a GPU, of the kind that the library was built for. */
} smp_device;

/** Tensors of other libraries, as their header dlpack.h declares them. */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

/**
 * A tensor on memory of the caller. A call borrows it until it returns. Memory of a GPU is ready
 * when the call begins: the caller has waited for what it does there; and when the call returns,
 * the library has done its part.
 *
 * An input or a target may be given by DLPack instead: then `dlpack` or `dlpack_versioned` says all
 * but the name, and `data` is NULL. The call takes it over, whether it succeeds or not: it calls
 * its deleter once, on the calling thread, before it returns. Memory that DLPack calls read-only is
 * copied.
 */
typedef struct smp_tensor {
  int64_t struct_size;           /**< sizeof(smp_tensor) */
  int32_t dtype;                 /**< an smp_dtype */
  int32_t layout;                /**< an smp_layout */
  int64_t dims;                  /**< 0 to SMP_MAX_DIMS */
  int64_t sizes[SMP_MAX_DIMS];   /**< x(i, j) has the same sizes in any layout. */
  int64_t strides[SMP_MAX_DIMS]; /**< elements between neighbours, for SMP_STRIDED */
  void* data;                    /**< the element of index 0, 0, ... */
  const char* name;              /**< name of an input that is given by it; else NULL */
  /* Since version 2: */
  int32_t device;                                    /**< an smp_device */
  int32_t device_index;                              /**< the number of the GPU; 0 for SMP_CPU */
  struct DLManagedTensor* dlpack;                    /**< an input by DLPack; else NULL */
  struct DLManagedTensorVersioned* dlpack_versioned; /**< the same of DLPack 1.0 and later */
} smp_tensor;

/** A session: a configuration, ranks, a model and its optimizer. */
typedef struct smp_session smp_session;

/** A model that is only run, without a session. */
typedef struct smp_model smp_model;

/**
 * Gives the gradients of a microbatch's outputs: a sum over microbatches is made of what they lead
 * to, and divided by their number. `outputs` are those of the model that need a gradient, in their
 * order, `gradients` as many tensors of the same sizes and types to be filled in; both are
 * contiguous (SMP_ROW_MAJOR), in the host's memory, and end with the call. `microbatch` counts from
 * 0 in each call of smp_train_by_gradient. Another result than 0 is an error, which ends the
 * session. It is called on the thread of that call, with the caller's floating-point traps and
 * OpenMP's number of threads, on the ranks of the last stage of the pipeline only. Functions of
 * this header that it calls there are refused.
 */
typedef int (*smp_gradient_callback)(void* context, int64_t microbatch, const smp_tensor* outputs,
                                     smp_tensor* gradients, int64_t count);

/** The version of the library's header: at least the program's SMP_C_VERSION, or it is too old. */
SMP_C_API int smp_c_version(void);

/** The text of the last call of this thread that failed; valid until its next one fails. */
SMP_C_API const char* smp_last_error(void);

/**
 * Sets how many threads the kernels of all calls use, on whatever thread: equal bits need equal
 * numbers. Without it that is libtorch's number at the first call.
 */
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
 * Chooses where this rank computes, an smp_device and its number; without this call on the CPU.
 * Before the first step. Not collective, but all ranks of a session choose devices of one kind.
 */
SMP_C_API int smp_set_device(smp_session* session, int32_t device, int32_t device_index);

/**
 * Loads the model of the session, once: the program that Python exported in training mode, the one
 * it exported in evaluation mode, or both; NULL for none. Collective.
 */
SMP_C_API int smp_load(smp_session* session, const char* train, const char* eval);

/**
 * Makes the optimizer, once, after smp_load: "sgd", "adam", "adamw", "adagrad" or "rmsprop" as in
 * libtorch, or "fused_sgd", "fused_adam", "fused_adamw", "fused_adagrad" with its fused kernels.
 * `options` are JSON text by libtorch's names, such as {"lr": 1e-3, "betas": [0.9, 0.95]};
 * "clip_grad_norm", the norm to which all gradients are clipped; and the loss scale, for models in
 * half precision: either "static_loss_scale", a number, or "dynamic_loss_scale": true with
 * "dynamic_loss_args", an object (docs/precision.md). NULL for defaults. Collective.
 */
SMP_C_API int smp_optimizer(smp_session* session, const char* name, const char* options);

/** Sets the learning rate from now on, the same on all ranks. */
SMP_C_API int smp_set_learning_rate(smp_session* session, double rate);

/**
 * The loss scale of the next step, and 1 in `skipped` if the last one has updated nothing since
 * its gradients had overflowed on some rank; else 0. Not collective.
 */
SMP_C_API int smp_loss_scale(const smp_session* session, double* scale, int64_t* skipped);

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
 * Writes the program of the file `program` with the trained weights as the file `path`, for
 * smp_model_open, smp_load and Python's torch.export.load: a program that smp_load was given, or
 * another one of the same model; NULL: that of evaluation, or without one that of training. Rank 0
 * reads and writes. Collective.
 */
SMP_C_API int smp_save_program(smp_session* session, const char* program, const char* path);

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
