// SPDX-License-Identifier: Apache-2.0
// Mistakes that do not compile, one a line, and the compiler's words: mistakes_test.py.

#include <torch/torch.h>

#include "smp/smp.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return x; }
};
TORCH_MODULE(Net);
struct OtherImpl : NetImpl {};
TORCH_MODULE(Other);
struct Batch {
  torch::Tensor x, y;
};
struct OtherAdam : torch::optim::Adam {
  using Adam::Adam;
};

void mistakes(Net net, torch::Tensor loss) {
  smp::DistributedModel<Net> model(net);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::Adam adam(net->parameters(), 0.1);
  torch::optim::AdamW adamw(net->parameters(), 0.1);
  torch::optim::LBFGS lbfgs(net->parameters(), 0.1);
  torch::optim::RMSprop rms(net->parameters(), 0.1);
  torch::optim::Adagrad ada(net->parameters(), 0.1);
  OtherAdam other(net->parameters(), 0.1);
  torch::optim::Optimizer& plain = sgd;
  auto optimizer = smp::distributed(sgd);

  model.parameters();    // expected: write model->parameters(...), not model.parameters(...)
  model.backward(loss);  // expected: write model->backward(...), not model.backward(...)
  model.train(false);    // expected: write model->train(...), not model.train(...)
  model.state_dict();    // expected: write model->state_dict(...), not model.state_dict(...)

  // Another type in each, since the compiler says it once for a type.
  smp::save("p", model, sgd);                  // expected: auto optimizer = smp::distributed(plain)
  smp::save("p", model, adam, "{}");           // expected: auto optimizer = smp::distributed(plain)
  smp::load("p", model, adamw);                // expected: auto optimizer = smp::distributed(plain)
  smp::keep_copy(model, lbfgs);                // expected: auto optimizer = smp::distributed(plain)
  (void)smp::save_async("p", model, rms);      // expected: smp::distributed(plain)
  smp::save_checkpoint("p", "t", model, ada);  // expected: smp::distributed(plain)
  smp::resume_from_checkpoint("p", {}, model, other);  // expected: smp::distributed(plain)
  smp::resume_after_restart(model, plain);             // expected: smp::distributed(plain)

  Other module;
  smp::save("p", net);                                // expected: pass the DistributedModel
  smp::load("p", *net);                               // expected: pass the DistributedModel
  (void)smp::save_async("p", net.ptr(), optimizer);   // expected: pass the DistributedModel
  smp::save_checkpoint("p", "t", module, optimizer);  // expected: pass the DistributedModel
  smp::resume_from_checkpoint("p", "t", *module);     // expected: pass the DistributedModel

  smp::clip_grad_norm_(net, 1.0);      // expected: not the module that it wraps
  (void)smp::grad_norm(*net);          // expected: not the module that it wraps
  smp::clip_grad_value_(module, 1.0);  // expected: not the module that it wraps
  smp::Ema of_module(net.ptr());       // expected: not the module that it wraps
  smp::Ema of_optimizer(model, sgd);   // expected: not a plain torch::optim optimizer

  OtherImpl impl;
  smp::DistributedModel<NetImpl> of_class(*net);  // expected: not the class of the module itself
  smp::DistributedModel deduced(impl);            // expected: not the class of the module itself

  auto loader = torch::data::make_data_loader(torch::data::datasets::TensorDataset({loss}), 4);
  auto train = smp::step([](torch::Tensor x, torch::Tensor y) { return x - y; });
  train(*loader);  // expected: not a DataLoader: loop over the loader and pass each batch
  train(loss);     // expected: do not fit the parameters of the step function
  train(loss, loss).item<double>();  // expected: take the mean or the sum of them first
  smp::Config().micro_batches(4);    // expected: did you mean 'microbatches'?

  const smp::KeyedRandom random(1, 0, 0, 0);  // expected: call to deleted constructor

  auto of_batch = smp::step([](Batch batch) { return batch.x; });
  of_batch(Batch{loss, loss});  // expected: list its fields: SMP_FIELDS(x, y);
  auto to_batch = smp::step([](torch::Tensor x) { return Batch{x, x}; });
  to_batch(loss);  // expected: list its fields: SMP_FIELDS(loss, logits);
}

// The right programs beside them.
void right(Net net, torch::Tensor loss) {
  smp::DistributedModel<Net> model(net);
  smp::DistributedModel of_holder(net);
  smp::DistributedModel of_pointer(net.ptr());
  torch::optim::SGD plain(model->parameters(), 0.1);
  auto optimizer = smp::distributed(plain);
  smp::DistributedOptimizer<torch::optim::SGD> other(model->parameters(), 0.1);
  model->backward(loss);
  const smp::KeyedRandom random(1, "train", 0, 0);
  model.forward(loss);
  model->forward(loss);
  smp::save("p", model);
  smp::save("p", model, "{}");
  smp::save("p", model, optimizer);
  smp::save("p", model, other, "{}");
  smp::load("p", model);
  smp::load("p", model, optimizer);
  smp::load("p", model, other);
  smp::save_checkpoint("p", "t", model, optimizer);
  smp::resume_from_checkpoint("p", std::nullopt, model, other, smp::LoadOptions());
  smp::clip_grad_norm_(model, 1.0);
  smp::clip_grad_norm_(net->parameters(), 1.0);
  smp::clip_grad_value_(of_pointer, 1.0);
  const smp::Ema ema(model, smp::EmaOptions().decay(0.9));
  const smp::Ema of_masters(model, other);
  const auto parts = smp::CheckpointParts().add(model, optimizer);
  smp::save("p", parts, "{}");
  smp::load("p", parts);
  smp::keep_copy(parts);
}
