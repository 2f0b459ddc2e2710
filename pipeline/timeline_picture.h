// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "pipeline/timeline.h"

namespace smp::pipeline {

/// A step of a timeline as an SVG picture, light or dark as the viewer prefers: a lane for each
/// rank with its actions coloured by kind and numbered by microbatch, its idle time, what it keeps
/// as a curve, an arrow for each transfer; below, on the same scale, the prediction. The pointer
/// shows what an action is; actions without length are left out. As wide as its actions need.
///
/// `index` counts `shown_steps`; `with_style` is false where the page has `picture_style` already.
/// Throws `smp::Error` when there is no such step.
std::string to_svg(const Timeline& timeline, size_t index = 0, bool with_style = true);

/// The colours, as CSS without its <style> element.
std::string picture_style();

}  // namespace smp::pipeline
