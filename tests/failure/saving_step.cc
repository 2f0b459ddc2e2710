// SPDX-License-Identifier: Apache-2.0
// usage: saving_step FOLDER [kill CALL | stop CALL | full]
//
// Trains and saves in the background, over an earlier checkpoint. The last rank is killed at the
// CALL-th of its file calls in the second save, or stops there, and then no rank trains meanwhile.
// With "full" it keeps copies in memory for which the last rank has no room for a while, and says
// which there is. Started by saving_test through smprun.

#include <iostream>
#include <string>

#include "checkpoint/reader.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/copy_holders.h"
#include "smp/smp.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/smp/models.h"

namespace {

using smp::runtime::Runtime;
using smp::testing::Fault;
using smp::testing::inject;
using smp::testing::TinyGpt;
using smp::testing::TinyGptImpl;

bool is_culprit() { return smp::rank() == smp::size() - 1; }

void say_what_is_kept(const std::string& copy) {
  smp::barrier();
  if (smp::rank() > 0) return;
  smp::checkpoint::Reader reader(copy);
  const bool is_whole = reader.find_damage(smp::checkpoint::Reader::Section::kAll).empty();
  std::cout << (is_whole ? "whole" : "damaged") << " copy of step " << reader.index().run.step
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argv[1], mode = argc > 2 ? argv[2] : "";
  const int call = argc > 3 ? std::stoi(argv[3]) : 0;
  torch::set_num_threads(1);
  torch::manual_seed(1);
  smp::init();
  TinyGpt net(/*tied=*/true, /*layers=*/2);
  smp::DistributedModel<TinyGpt> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-2);
  auto step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = net->loss(x, y);
    model->backward(loss);
    return loss;
  });
  const auto train = [&] {
    const auto batch = TinyGptImpl::batch(4);
    optimizer.zero_grad();
    step(batch[0], batch[1]);
    optimizer.step();
  };
  train();
  if (mode == "full") {
    const std::string copy = Runtime::get().checkpoint_context->holders->copy();
    const auto keep = [&](int copies) {
      for (int i = 0; i < copies; ++i) {
        train();
        smp::keep_copy(model, optimizer);
        Runtime::get().checkpoint_context->finish();
      }
      say_what_is_kept(copy);
    };
    keep(3);
    if (is_culprit()) inject(copy, Fault::kNoSpace, 0);
    keep(3);
    if (is_culprit()) inject(copy, Fault::kNone, 0);
    keep(1);
    smp::shutdown();
    return 0;
  }
  smp::save_async(folder + "/a", model, optimizer, R"({"save": 1})").wait();
  train();
  smp::save(folder + "/expected", model, optimizer, R"({"save": 2})");
  if (!mode.empty() && is_culprit()) {
    inject(folder, mode == "stop" ? Fault::kStop : Fault::kKill, call);
  }
  const auto handle = smp::save_async(folder + "/a", model, optimizer, R"({"save": 2})");
  for (int i = 0; i < 3 && mode != "stop"; ++i) train();  // other values everywhere
  handle.wait();
  smp::shutdown();
  return 0;
}
