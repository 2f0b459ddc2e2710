// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

// Written by grad_scaler_trace.py with torch 2.11.0.
namespace smp::testing {

/// A step of torch.amp.GradScaler: whether the gradient was not finite, whether the optimizer
/// stepped, and the state after update().
struct ScalerStep {
  bool overflow;
  bool stepped;
  double scale;
  int growth_tracker;
};

struct ScalerRun {
  double init_scale, growth_factor, backoff_factor;
  int growth_interval;
  std::vector<ScalerStep> steps;
};

inline const std::vector<ScalerRun>& scaler_runs() {
  static const std::vector<ScalerRun> runs = {
      {0x1.0000000000000p+16,
       2.0,
       0.5,
       3,
       {
           {false, true, 0x1.0000000000000p+16, 1}, {false, true, 0x1.0000000000000p+16, 2},
           {false, true, 0x1.0000000000000p+17, 0}, {true, false, 0x1.0000000000000p+16, 0},
           {false, true, 0x1.0000000000000p+16, 1}, {false, true, 0x1.0000000000000p+16, 2},
           {false, true, 0x1.0000000000000p+17, 0}, {false, true, 0x1.0000000000000p+17, 1},
           {false, true, 0x1.0000000000000p+17, 2}, {false, true, 0x1.0000000000000p+18, 0},
           {false, true, 0x1.0000000000000p+18, 1}, {true, false, 0x1.0000000000000p+17, 0},
           {false, true, 0x1.0000000000000p+17, 1}, {false, true, 0x1.0000000000000p+17, 2},
           {false, true, 0x1.0000000000000p+18, 0}, {false, true, 0x1.0000000000000p+18, 1},
           {false, true, 0x1.0000000000000p+18, 2}, {true, false, 0x1.0000000000000p+17, 0},
           {true, false, 0x1.0000000000000p+16, 0}, {false, true, 0x1.0000000000000p+16, 1},
           {true, false, 0x1.0000000000000p+15, 0}, {false, true, 0x1.0000000000000p+15, 1},
           {false, true, 0x1.0000000000000p+15, 2}, {false, true, 0x1.0000000000000p+16, 0},
       }},
      {0x1.d99999999999ap+1,
       1.5,
       0.3,
       2,
       {
           {true, false, 0x1.1c28f60000000p+0, 0},  {true, false, 0x1.54fdf40000000p-2, 0},
           {false, true, 0x1.54fdf40000000p-2, 1},  {false, true, 0x1.ff7cee0000000p-2, 0},
           {true, false, 0x1.32e48e0000000p-3, 0},  {false, true, 0x1.32e48e0000000p-3, 1},
           {false, true, 0x1.cc56d40000000p-3, 0},  {true, false, 0x1.1434180000000p-4, 0},
           {false, true, 0x1.1434180000000p-4, 1},  {true, false, 0x1.4b71b60000000p-6, 0},
           {true, false, 0x1.8dbba80000000p-8, 0},  {false, true, 0x1.8dbba80000000p-8, 1},
           {false, true, 0x1.2a4cbe0000000p-7, 0},  {false, true, 0x1.2a4cbe0000000p-7, 1},
           {true, false, 0x1.65f5b00000000p-9, 0},  {true, false, 0x1.ad8d3a0000000p-11, 0},
           {false, true, 0x1.ad8d3a0000000p-11, 1}, {false, true, 0x1.4229ec0000000p-10, 0},
           {false, true, 0x1.4229ec0000000p-10, 1}, {false, true, 0x1.e33ee20000000p-10, 0},
           {false, true, 0x1.e33ee20000000p-10, 1}, {false, true, 0x1.6a6f2a0000000p-9, 0},
           {false, true, 0x1.6a6f2a0000000p-9, 1},  {false, true, 0x1.0fd3600000000p-8, 0},
       }},
      {0x1.0000000000000p+126,
       2.0,
       0.5,
       1,
       {
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {true, false, 0x1.0000000000000p+126, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {true, false, 0x1.0000000000000p+126, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
           {false, true, 0x1.0000000000000p+127, 0}, {false, true, 0x1.0000000000000p+127, 0},
       }},
      {0x1.0000000000000p-146,
       2.0,
       0.25,
       2,
       {
           {true, false, 0x1.0000000000000p-148, 0},
           {false, true, 0x1.0000000000000p-148, 1},
           {false, true, 0x1.0000000000000p-147, 0},
           {false, true, 0x1.0000000000000p-147, 1},
           {true, false, 0x1.0000000000000p-149, 0},
           {true, false, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {false, true, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {false, true, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {true, false, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {false, true, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {false, true, 0x0.0p+0, 0},
           {true, false, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {true, false, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {false, true, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
           {false, true, 0x0.0p+0, 0},
           {false, true, 0x0.0p+0, 1},
       }},
  };
  return runs;
}

}  // namespace smp::testing
