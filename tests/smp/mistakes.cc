// SPDX-License-Identifier: Apache-2.0
// Mistakes that do not compile, one a line, and what the compiler says: mistakes_test.py.

#include <torch/torch.h>

#include "smp/smp.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return x; }
};
TORCH_MODULE(Net);
struct OtherImpl : NetImpl {};

void mistakes(Net net, torch::Tensor loss) {
  smp::DistributedModel<Net> model(net);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::Adam adam(net->parameters(), 0.1);
  torch::optim::AdamW adamw(net->parameters(), 0.1);

  model.parameters();    // expected: write model->parameters(...), not model.parameters(...)
  model.backward(loss);  // expected: write model->backward(...), not model.backward(...)
  model.train(false);    // expected: write model->train(...), not model.train(...)
  model.state_dict();    // expected: write model->state_dict(...), not model.state_dict(...)

  // Another type in each, since the compiler says it once for a type.
  smp::save("p", model, sgd);         // expected: auto optimizer = smp::distributed(plain)
  smp::save("p", model, adam, "{}");  // expected: auto optimizer = smp::distributed(plain)
  smp::load("p", model, adamw);       // expected: auto optimizer = smp::distributed(plain)

  OtherImpl other;
  smp::DistributedModel<NetImpl> of_class(*net);  // expected: not the class of the module itself
  smp::DistributedModel deduced(other);           // expected: not the class of the module itself
}

// What is right beside them.
void right(Net net, torch::Tensor loss) {
  smp::DistributedModel<Net> model(net);
  smp::DistributedModel of_holder(net);
  smp::DistributedModel of_pointer(net.ptr());
  torch::optim::SGD plain(model->parameters(), 0.1);
  auto optimizer = smp::distributed(plain);
  smp::DistributedOptimizer<torch::optim::SGD> other(model->parameters(), 0.1);
  model->backward(loss);
  model.forward(loss);
  model->forward(loss);
  smp::save("p", model);
  smp::save("p", model, "{}");
  smp::save("p", model, optimizer);
  smp::save("p", model, other, "{}");
  smp::load("p", model);
  smp::load("p", model, optimizer);
  smp::load("p", model, other);
}
