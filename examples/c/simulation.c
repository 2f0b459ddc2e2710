// SPDX-License-Identifier: Apache-2.0
// Trains a model in a simulation: the first half of the ranks simulate, the others train a model of
// it that Python has written (docs/c.md).
//
//   mpirun -n 4 simulation train.pt2 FOLDER

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "smp/c.h"

enum { kCells = 16, kInputs = 3, kOutputs = 2, kSteps = 12, kMicrobatches = 2 };

// A step's samples: row i is cell i's.
typedef struct Batch {
  float x[kCells][kInputs];
  float y[kCells][kOutputs];
} Batch;

// --- The simulation ---

// Cell `cell` in step `step`: three numbers, and two that the model shall predict from them.
static void simulate_cell(int cell, int step, float* x, float* y) {
  for (int i = 0; i < kInputs; ++i) x[i] = (float)((5 * cell + 7 * step + 11 * i) % 32 - 16) / 16;
  y[0] = x[0] * x[1] - x[2];
  y[1] = x[0] + x[1] * x[2] / 2;
}

// The ranks of `simulators` share the cells, and the first of them sends them to all trainers.
static void simulate(MPI_Comm simulators, int trainers) {
  int rank, size;
  MPI_Comm_rank(simulators, &rank);
  MPI_Comm_size(simulators, &size);
  double energy = 0;
  for (int step = 0; step < kSteps; ++step) {
    Batch mine, all;
    memset(&mine, 0, sizeof mine);
    for (int cell = rank; cell < kCells; cell += size) {
      simulate_cell(cell, step, mine.x[cell], mine.y[cell]);
      energy += mine.y[cell][0] * mine.y[cell][0];
    }
    MPI_Reduce(&mine, &all, sizeof all / sizeof(float), MPI_FLOAT, MPI_SUM, 0, simulators);
    for (int i = 0; rank == 0 && i < trainers; ++i) {
      MPI_Send(&all, sizeof all / sizeof(float), MPI_FLOAT, size + i, step, MPI_COMM_WORLD);
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, &energy, 1, MPI_DOUBLE, MPI_SUM, simulators);
  if (rank == 0) printf("simulated %d steps, energy %.6f\n", kSteps, energy);
}

// --- The training ---

// Ends the program with the library's text for a call that failed.
static void check(int code) {
  if (code == SMP_OK) return;
  fprintf(stderr, "error %d: %s\n", code, smp_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static smp_tensor rows_of(void* data, int64_t columns) {
  smp_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.struct_size = sizeof tensor;
  tensor.dtype = SMP_FLOAT32;
  tensor.dims = 2;
  tensor.sizes[0] = kCells;
  tensor.sizes[1] = columns;
  tensor.data = data;
  return tensor;
}

// The gradient of half the squared error, in place of a loss, as an adjoint of the simulation would
// give it. `context` is the batch, of which these are the outputs of one microbatch.
static int gradient_of_error(void* context, int64_t microbatch, const smp_tensor* outputs,
                             smp_tensor* gradients, int64_t count) {
  const Batch* batch = context;
  if (count != 1) return 1;
  const int64_t rows = outputs[0].sizes[0];
  const float(*y)[kOutputs] = batch->y + microbatch * rows;
  const float* output = outputs[0].data;
  float* gradient = gradients[0].data;
  for (int64_t i = 0; i < rows; ++i) {
    for (int j = 0; j < kOutputs; ++j) {
      gradient[i * kOutputs + j] = (output[i * kOutputs + j] - y[i][j]) / (float)rows;
    }
  }
  return 0;
}

static void train(MPI_Comm trainers, const char* program, const char* folder) {
  int rank, size;
  MPI_Comm_rank(trainers, &rank);
  MPI_Comm_size(trainers, &size);
  char config[200];
  snprintf(config, sizeof config, "{\"partitions\": %d, \"microbatches\": %d}", size,
           kMicrobatches);
  smp_session* session;
  check(smp_set_threads(1));
  check(smp_open_mpi(config, MPI_Comm_c2f(trainers), &session));
  check(smp_load(session, program, NULL));
  check(smp_optimizer(session, "adamw", "{\"lr\": 0.01}"));
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    Batch batch;
    MPI_Recv(&batch, sizeof batch / sizeof(float), MPI_FLOAT, 0, step, MPI_COMM_WORLD,
             MPI_STATUS_IGNORE);
    const smp_tensor x = rows_of(batch.x, kInputs), y = rows_of(batch.y, kOutputs);
    if (step % 2 == 0) {
      check(smp_train(session, &x, 1, "mse", &y, &loss));
    } else {
      check(smp_train_by_gradient(session, &x, 1, gradient_of_error, &batch));
    }
  }
  check(smp_save_weights(session, folder, "trained"));
  check(smp_close(session));
  if (rank == 0) printf("trained on %d ranks, last loss %.6f\n", size, loss);
}

int main(int argc, char** argv) {
  int level, rank, size;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc != 3 || size < 2 || size % 2 != 0) {
    if (rank == 0) fprintf(stderr, "usage: mpirun -n 4 simulation train.pt2 FOLDER\n");
    MPI_Finalize();
    return 2;
  }
  const int is_trainer = rank >= size / 2;
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, is_trainer, rank, &half);
  if (is_trainer) {
    train(half, argv[1], argv[2]);
  } else {
    simulate(half, size / 2);
  }
  MPI_Comm_free(&half);
  MPI_Finalize();
  return 0;
}
