// SPDX-License-Identifier: Apache-2.0
// Sessions on communicators of a program's own MPI, from C; mpirun -n 4. Ranks 2 and 3 train, 0 and
// 1 do something else.

#include <ATen/dlpack.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "smp/c.h"

static int rank_of_world, failures = 0;

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      fprintf(stderr, "rank %d: %s:%d: %s is not so. Last error: %s\n", rank_of_world, __FILE__, \
              __LINE__, #condition, smp_last_error());                                           \
      ++failures;                                                                                \
    }                                                                                            \
  } while (0)

#define EXPECT_TEXT(text) EXPECT(strstr(smp_last_error(), text) != NULL)

static const char* const kProgram = "tests/c/train.pt2";
static const char* const kPipeline = "{\"partitions\": 2, \"microbatches\": 2}";

static float samples[8][3], targets[8][2];

static void make_batch(void) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 3; ++j) samples[i][j] = (float)((3 * i + 5 * j) % 7) / 8;
    for (int j = 0; j < 2; ++j) targets[i][j] = (float)((i + j) % 3) / 4;
  }
}

static smp_tensor rows(void* data, int64_t columns) {
  smp_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.struct_size = sizeof tensor;
  tensor.dtype = SMP_FLOAT32;
  tensor.dims = 2;
  tensor.sizes[0] = 8;
  tensor.sizes[1] = columns;
  tensor.data = data;
  return tensor;
}

static smp_session* open_for_training(MPI_Comm communicator, const char* config) {
  smp_session* session = NULL;
  EXPECT(smp_open_mpi(config, MPI_Comm_c2f(communicator), &session) == SMP_OK);
  EXPECT(smp_load(session, kProgram, NULL) == SMP_OK);
  EXPECT(smp_optimizer(session, "sgd", "{\"lr\": 0.1}") == SMP_OK);
  return session;
}

static int train(smp_session* session, double* loss) {
  const smp_tensor x = rows(samples, 3), y = rows(targets, 2);
  return smp_train(session, &x, 1, "mse", &y, loss);
}

// One rank's error is all ranks' error, and a code on each; then there can be another session.
static void test_error_of_one_rank(MPI_Comm communicator, int rank) {
  smp_session* session = open_for_training(communicator, kPipeline);
  EXPECT(train(session, NULL) == SMP_OK);
  MPI_Barrier(communicator);  // a rank that is still in the first call would be told of the error
  const smp_tensor y = rows(targets, 2);
  smp_tensor x = rows(samples, 3);
  if (rank == 1) x.dtype = 77;
  const int code = smp_train(session, &x, 1, "mse", &y, NULL);
  EXPECT(code == (rank == 1 ? SMP_ERROR_USAGE : SMP_ERROR_COMM));
  EXPECT_TEXT("dtype 77 is none of smp_dtype");  // also where another rank has failed
  EXPECT_TEXT("The session has ended on all its ranks");
  EXPECT(smp_is_alive(session) == 0);
  EXPECT(train(session, NULL) == SMP_ERROR_ENDED);
  EXPECT(smp_close(session) == SMP_OK);

  session = open_for_training(communicator, kPipeline);
  double first = 0, second = 0;
  EXPECT(train(session, &first) == SMP_OK);
  EXPECT(train(session, &second) == SMP_OK);
  EXPECT(second < first);
  EXPECT(smp_close(session) == SMP_OK);
}

static int no_gradient(void* context, int64_t microbatch, const smp_tensor* outputs,
                       smp_tensor* gradients, int64_t count) {
  (void)context, (void)microbatch, (void)outputs, (void)gradients;
  return count == 1 ? 0 : 1;
}

// Ranks of a tensor-parallel group are asked for the same outputs, of one batch.
static void test_gradients_of_a_tensor_parallel_group(MPI_Comm communicator) {
  const smp_tensor x = rows(samples, 3);
  smp_session* session =
      open_for_training(communicator, "{\"tensor_parallel_degree\": 2, \"ddp\": true}");
  EXPECT(smp_train_by_gradient(session, &x, 1, no_gradient, NULL) == SMP_ERROR_USAGE);
  EXPECT_TEXT("with \"tensor_parallel_degree\" above 1 a rank runs the batches of others, too");
  EXPECT(smp_close(session) == SMP_OK);
  session = open_for_training(
      communicator, "{\"tensor_parallel_degree\": 2, \"ddp\": true, \"prescaled_batch\": true}");
  EXPECT(smp_train_by_gradient(session, &x, 1, no_gradient, NULL) == SMP_OK);
  EXPECT(smp_close(session) == SMP_OK);
}

// All ranks know that one cannot begin.
static void test_start_that_fails(MPI_Comm communicator, int rank) {
  smp_session* session = NULL;
  const char* config = rank == 1 ? "{\"partitions\": -1}" : kPipeline;
  const int code = smp_open_mpi(config, MPI_Comm_c2f(communicator), &session);
  EXPECT(code == (rank == 1 ? SMP_ERROR_CONFIG : SMP_ERROR_COMM));
  EXPECT_TEXT("partitions");
  if (rank == 0) EXPECT_TEXT("rank 1 of the communicator cannot begin the session, so that none");
  EXPECT(session == NULL);
  // Each for itself, these are right; together they are not.
  config = rank == 1 ? "{\"partitions\": 2, \"seed\": 1}" : kPipeline;
  EXPECT(smp_open_mpi(config, MPI_Comm_c2f(communicator), &session) == SMP_ERROR_CONFIG);
  EXPECT_TEXT("the configuration differs between ranks");
  EXPECT(session == NULL);
}

// The losses of three steps of a session alone.
static void train_alone(MPI_Comm communicator, const char* config, double* losses) {
  smp_session* session = open_for_training(communicator, config);
  for (int i = 0; i < 3; ++i) EXPECT(train(session, &losses[i]) == SMP_OK);
  EXPECT(smp_close(session) == SMP_OK);
}

// Two of the same ranks, and one of this rank alone, which take turns; an error of one rank in one
// of them ends that on all its ranks, and no other.
static void test_several_sessions(MPI_Comm communicator, int rank) {
  const char* const replicas = "{\"ddp\": true, \"microbatches\": 4}";
  double pipeline_alone[3], replicas_alone[3], own_alone[3], loss = 0;
  train_alone(communicator, kPipeline, pipeline_alone);
  train_alone(communicator, replicas, replicas_alone);
  train_alone(MPI_COMM_SELF, NULL, own_alone);
  smp_session* first = open_for_training(communicator, kPipeline);
  smp_session* second = open_for_training(communicator, replicas);
  smp_session* own = open_for_training(MPI_COMM_SELF, NULL);
  int64_t ranks = 0, size = 0;
  EXPECT(smp_rank(second, &ranks, &size) == SMP_OK && size == 2);
  EXPECT(smp_rank(own, &ranks, &size) == SMP_OK && size == 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT(train(first, &loss) == SMP_OK && loss == pipeline_alone[i]);
    EXPECT(train(own, &loss) == SMP_OK && loss == own_alone[i]);
    if (i == 2) break;
    EXPECT(train(second, &loss) == SMP_OK && loss == replicas_alone[i]);
  }
  MPI_Barrier(communicator);  // a rank that is still in a call would be told of the error there
  const smp_tensor y = rows(targets, 2);
  smp_tensor x = rows(samples, 3);
  if (rank == 1) x.dtype = 77;
  const int code = smp_train(first, &x, 1, "mse", &y, NULL);
  EXPECT(code == (rank == 1 ? SMP_ERROR_USAGE : SMP_ERROR_COMM));
  EXPECT_TEXT("dtype 77 is none of smp_dtype");
  EXPECT(smp_is_alive(first) == 0 && smp_is_alive(second) == 1 && smp_is_alive(own) == 1);
  EXPECT(smp_close(first) == SMP_OK);
  EXPECT(train(second, &loss) == SMP_OK && loss == replicas_alone[2]);
  EXPECT(smp_close(second) == SMP_OK);
  EXPECT(smp_close(own) == SMP_OK);
}

// One rank writes the program, and all know whether it could.
static void test_programs_of_ranks(MPI_Comm communicator, int rank) {
  smp_session* session = open_for_training(communicator, kPipeline);
  EXPECT(train(session, NULL) == SMP_OK);
  EXPECT(smp_save_program(session, NULL, "/proc/none/trained.pt2") == SMP_ERROR_CHECKPOINT);
  EXPECT_TEXT("/proc/none");
  char path[1000];
  const char* folder = getenv("TEST_TMPDIR");
  snprintf(path, sizeof path, "%s/trained.pt2", folder == NULL ? "/tmp" : folder);
  EXPECT(smp_save_program(session, NULL, path) == SMP_OK);
  double goes_on = 0, loss = 0;
  EXPECT(train(session, &goes_on) == SMP_OK);
  EXPECT(smp_close(session) == SMP_OK);
  EXPECT(smp_open_mpi(kPipeline, MPI_Comm_c2f(communicator), &session) == SMP_OK);
  EXPECT(smp_load(session, path, NULL) == SMP_OK);
  EXPECT(smp_optimizer(session, "sgd", NULL) == SMP_OK);
  EXPECT(train(session, &loss) == SMP_OK && loss == goes_on);
  EXPECT(smp_close(session) == SMP_OK);
  if (rank == 0) remove(path);
}

static void* open_on_thread(void* communicator) {
  smp_session* session = NULL;
  EXPECT(smp_open_mpi(NULL, MPI_Comm_c2f(*(MPI_Comm*)communicator), &session) == SMP_ERROR_USAGE);
  EXPECT_TEXT("a session is begun on a communicator by a thread that may not call MPI");
  return NULL;
}

static void test_communicators_that_are_none(MPI_Comm communicator) {
  smp_session* session = NULL;
  EXPECT(smp_open_mpi(NULL, 123456789, &session) == SMP_ERROR_USAGE);
  EXPECT_TEXT("the number 123456789 is no handle of an MPI communicator");
  EXPECT(smp_open_mpi(NULL, MPI_Comm_c2f(MPI_COMM_NULL), &session) == SMP_ERROR_USAGE);
  EXPECT_TEXT("is no handle of an MPI communicator");
  pthread_t thread;
  EXPECT(pthread_create(&thread, NULL, open_on_thread, &communicator) == 0);
  pthread_join(thread, NULL);
}

static void test_two_groups(MPI_Comm half) {
  MPI_Comm both;
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, rank_of_world < 2 ? 2 : 0, 9, &both);
  smp_session* session = NULL;
  EXPECT(smp_open_mpi(NULL, MPI_Comm_c2f(both), &session) == SMP_ERROR_USAGE);
  EXPECT_TEXT("a session are those of a communicator of one group, and this is an");
  MPI_Comm_free(&both);
}

// Ranks are the communicator's, whatever their numbers in the world.
static void test_ranks_in_another_order(void) {
  MPI_Comm reversed;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank_of_world, &reversed);
  smp_session* session =
      open_for_training(reversed, "{\"partitions\": 2, \"microbatches\": 2, \"ddp\": true}");
  int64_t rank = -1, size = -1, replica = -1, replicas = -1;
  EXPECT(smp_rank(session, &rank, &size) == SMP_OK);
  EXPECT(rank == 3 - rank_of_world && size == 4);
  EXPECT(smp_replica(session, &replica, &replicas) == SMP_OK);
  EXPECT(replicas == 2);
  double loss = 0, least = 0, most = 0;
  EXPECT(train(session, &loss) == SMP_OK);
  MPI_Allreduce(&loss, &least, 1, MPI_DOUBLE, MPI_MIN, reversed);
  MPI_Allreduce(&loss, &most, 1, MPI_DOUBLE, MPI_MAX, reversed);
  EXPECT(loss > 0 && least == most);
  EXPECT(smp_close(session) == SMP_OK);
  MPI_Comm_free(&reversed);
}

static void check(int code) { EXPECT(code == SMP_OK); }

static int given_back = 0;

static void give_back(DLManagedTensor* tensor) {
  (void)tensor;
  ++given_back;
}

// The blocks of docs/c.md that the examples do not have; this process alone.
static void test_half_precision_and_dlpack(void) {
  smp_session* session = NULL;
  double loss = -1, scale = 0;
  int64_t skipped = -1, sizes[] = {8, 3};
  DLManagedTensor lent = {
      {samples, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, sizes, NULL, 0}, NULL, give_back};
  DLManagedTensor* const managed = &lent;
  const smp_tensor y = rows(targets, 2);
  check(smp_open("{\"fp16\": true}", &session));
  check(smp_load(session, kProgram, NULL));
  const char* options =
      "{\"lr\": 0.01, \"clip_grad_norm\": 1, \"dynamic_loss_scale\": true,"
      " \"dynamic_loss_args\": {\"init_scale\": 65536}}";
  check(smp_optimizer(session, "adamw", options));
  smp_tensor x = {.struct_size = sizeof x, .dlpack = managed};
  check(smp_train(session, &x, 1, "mse", &y, &loss));
  check(smp_loss_scale(session, &scale, &skipped));
  EXPECT(given_back == 1 && loss > 0 && scale > 0 && scale <= 65536);
  check(smp_close(session));
}

// The work of the other half meanwhile.
static void compute_together(MPI_Comm communicator) {
  for (int i = 0; i < 1000; ++i) {
    int sum = 0;
    MPI_Allreduce(&i, &sum, 1, MPI_INT, MPI_SUM, communicator);
    EXPECT(sum == 2 * i);
  }
}

static void on_error(MPI_Comm* communicator, int* code, ...) {
  (void)communicator;
  fprintf(stderr, "rank %d: MPI's error handler was called with %d\n", rank_of_world, *code);
  ++failures;
}

int main(int argc, char** argv) {
  int level, rank;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_of_world);
  MPI_Errhandler own, now;
  MPI_Comm_create_errhandler(on_error, &own);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, own);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank_of_world / 2, rank_of_world, &half);
  MPI_Comm_rank(half, &rank);
  make_batch();
  EXPECT(smp_set_threads(1) == SMP_OK);

  if (rank_of_world >= 2) {
    test_error_of_one_rank(half, rank);
    test_several_sessions(half, rank);
    test_programs_of_ranks(half, rank);
    test_gradients_of_a_tensor_parallel_group(half);
    test_start_that_fails(half, rank);
    test_communicators_that_are_none(half);
  } else {
    compute_together(half);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // MPI goes on on all ranks
  compute_together(half);
  test_half_precision_and_dlpack();
  test_two_groups(half);
  test_ranks_in_another_order();

  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &now);
  EXPECT(now == own);
  MPI_Allreduce(MPI_IN_PLACE, &failures, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Comm_free(&half);
  MPI_Finalize();
  if (rank_of_world == 0) printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
