// SPDX-License-Identifier: Apache-2.0
// The program by hand of docs/from/others.md, "A loop over MPI".
#include <mpi.h>

#include <vector>

#include "tests/docs/from/training.h"

void send(const torch::Tensor& tensor, int rank) {
  auto bytes = tensor.detach().contiguous();
  MPI_Send(bytes.data_ptr(), static_cast<int>(bytes.nbytes()), MPI_BYTE, rank, 0, MPI_COMM_WORLD);
}

torch::Tensor receive(int rank) {
  auto tensor = torch::empty({8, 64});  // known by heart
  MPI_Recv(tensor.data_ptr(), static_cast<int>(tensor.nbytes()), MPI_BYTE, rank, 0, MPI_COMM_WORLD,
           MPI_STATUS_IGNORE);
  return tensor;
}

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  const auto batches = make_batches();
  std::vector<double> losses;

  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);

  torch::nn::Sequential first{torch::nn::Linear(8, 64), torch::nn::Tanh()};
  torch::nn::Sequential second{torch::nn::Linear(64, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 3)};
  auto half = rank == 0 ? first : second;
  torch::optim::AdamW optimizer(half->parameters(), torch::optim::AdamWOptions(1e-3));

  for (const auto& [data, target] : batches) {
    optimizer.zero_grad();
    std::vector<torch::Tensor> inputs, outputs;
    double sum = 0;
    for (int m = 0; m < kMicrobatches; ++m) {
      if (rank == 0) {
        outputs.push_back(half->forward(data.chunk(kMicrobatches)[m]));
        send(outputs[m], 1);
      } else {
        inputs.push_back(receive(0).requires_grad_());
        auto loss =
            torch::cross_entropy_loss(half->forward(inputs[m]), target.chunk(kMicrobatches)[m]);
        outputs.push_back(loss / kMicrobatches);
        sum += loss.item<double>();
      }
    }
    for (int m = 0; m < kMicrobatches; ++m) {
      if (rank == 0) {
        outputs[m].backward(receive(1));
      } else {
        outputs[m].backward();
        send(inputs[m].grad(), 0);
      }
    }
    optimizer.step();
    if (rank == 1) losses.push_back(sum / kMicrobatches);
  }
  MPI_Finalize();

  return rank == 1 ? check_losses(losses, plain_losses()) : 0;
}
