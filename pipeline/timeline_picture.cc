// SPDX-License-Identifier: Apache-2.0
#include "pipeline/timeline_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/svg.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

// All lengths are in pixels.
constexpr double kMargin = 28;
constexpr double kLabel = 82;    // left of the chart
constexpr double kFigures = 96;  // right of it
constexpr double kMinChart = 820;
constexpr double kMaxChart = 12000;
constexpr double kTitle = 52;
constexpr double kLegend = 34;
constexpr double kHeading = 30;
constexpr double kBar = 26;
constexpr double kMemory = 24;
constexpr double kMemoryGap = 5;
constexpr double kReduction = 3.5;  // between a bar and what is below
constexpr double kLaneGap = 16;
constexpr double kSmallBar = 18;
constexpr double kSmallGap = 6;
constexpr double kAxis = 24;
constexpr double kNumberSize = 10.5;
constexpr double kLeastWidth = 0.8;  // of an action that takes any time

/// Colours by class, light and dark.
struct Color {
  const char* name;
  const char* property;
  uint32_t light;
  uint32_t dark;
};

constexpr std::array<Color, 16> kColors = {{
    {"bg", "fill", 0xffffff, 0x10171f},
    {"ink", "fill", 0x1f2933, 0xe6eaee},
    {"mute", "fill", 0x616e7c, 0x98a4b1},
    {"ground", "fill", 0xf1f3f5, 0x1a232d},
    {"grid", "stroke", 0xdde2e7, 0x2c3844},
    {"end", "stroke", 0x9aa5b1, 0x66727f},
    {"num", "fill", 0xffffff, 0x0d141b},
    {"wait", "fill", 0xf4dfe3, 0x35262e},
    {"hatch", "fill", 0xdda4b0, 0x7d4a58},
    {"send", "fill", 0x8a5cc7, 0xb491ec},
    {"reduce", "fill", 0xc44f6a, 0xea7f98},
    {"area", "fill", 0xd5dde6, 0x2a3a4b},
    {"curve", "stroke", 0x7b8da3, 0x7f95ad},
    {"bad", "fill", 0xb23a55, 0xf08ca2},
    {"values", "stroke", 0x4a83c9, 0x6aa5ee},
    {"grads", "stroke", 0x3c9a63, 0x5cc48b},
}};

/// Of the computes: shade 0 is for the first stage of a rank, the others for its next ones.
constexpr std::array<Color, 4> kComputes = {{
    {"f", "fill", 0x4a83c9, 0x6aa5ee},
    {"b", "fill", 0x3c9a63, 0x5cc48b},
    {"i", "fill", 0x2b959e, 0x45bcc6},
    {"w", "fill", 0xd58f2c, 0xe9b257},
}};
constexpr int kShades = 4;
constexpr double kShade = 0.24;  // part of the colour that each next stage loses

/// `color` with every component times `factor`.
uint32_t darker(uint32_t color, double factor) {
  uint32_t result = 0;
  for (const int shift : {16, 8, 0}) {
    const double part = static_cast<double>((color >> shift) & 0xff) * factor;
    result |= static_cast<uint32_t>(part) << shift;
  }
  return result;
}

std::string rules(bool dark) {
  std::string css;
  for (const Color& color : kColors) {
    css += fmt::format(".{}{{{}:#{:06x}}}", color.name, color.property,
                       dark ? color.dark : color.light);
  }
  for (const Color& color : kComputes) {
    for (int shade = 0; shade < kShades; ++shade) {
      css += fmt::format(".{}{}{{fill:#{:06x}}}", color.name, shade,
                         darker(dark ? color.dark : color.light, std::pow(1 - kShade, shade)));
    }
  }
  return css;
}

/// The class of an action's bar without its shade.
const char* class_of(const Action& action) {
  switch (action.kind) {
    case Kind::kForward:
      return "f";
    case Kind::kBackward:
      return "b";
    case Kind::kBackwardInput:
      return "i";
    case Kind::kBackwardWeight:
      return "w";
    case Kind::kReduce:
      return "reduce";
    default:
      return action.is_send() ? "send" : "wait";
  }
}

/// 1, 2 or 5 times a power of ten, such that an axis of `length` has about `parts` of them.
double tick(double length, double parts) {
  const double rough = length / parts;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (rough <= factor * power) return factor * power;
  }
  return 10 * power;
}

std::vector<int> stages_of(const Lane& lane) {
  std::set<int> stages;
  for (const TimedAction& timed : lane.actions) stages.insert(timed.action.stage);
  return {stages.begin(), stages.end()};
}

std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }

class Picture {
 public:
  Picture(const Timeline& timeline, const StepTimeline& step, size_t index)
      : timeline_(timeline), step_(step), id_(index) {
    if (!timeline.measured.empty() && timeline.predicted) below_ = &*timeline.predicted;
    for (const Lane& lane : step.lanes) {
      peak_ = std::max(peak_, lane.peak_memory());
      replicas_ = replicas_ || lane.replica > 0;
    }
    length_ = std::max(step.makespan, below_ ? below_->makespan : 0);
    chart_ = chart_width();
  }

  std::string draw(bool with_style) {
    if (with_style) svg_.raw("<style>" + picture_style() + "</style>\n");
    svg_.raw("<rect class=\"bg\" width=\"100%\" height=\"100%\"/>\n");
    draw_definitions();
    draw_title();
    draw_legend(kMargin + kTitle);
    double y = kMargin + kTitle + kLegend;
    y = draw_lanes(step_, timeline_.measured.empty() ? "Predicted" : "Measured", y,
                   /*small=*/false);
    if (below_ != nullptr) y = draw_lanes(*below_, "Predicted", y, /*small=*/true);
    return svg_.finish(width(), y + kMargin / 2, timeline_.title, /*background=*/"");
  }

 private:
  double width() const { return 2 * kMargin + kLabel + chart_ + kFigures; }
  double left() const { return kMargin + kLabel; }
  double x(double time) const { return left() + (length_ > 0 ? time / length_ * chart_ : 0); }
  double memory_height() const { return peak_ > 0 ? kMemoryGap + kMemory : 0; }

  /// Such that most computes have room for their numbers.
  double chart_width() const {
    std::vector<double> computes;
    int last = 0;
    for (const Lane& lane : step_.lanes) {
      for (const TimedAction& timed : lane.actions) {
        if (!timed.action.is_compute()) continue;
        computes.push_back(timed.end - timed.start);
        last = std::max(last, timed.action.microbatch);
      }
    }
    if (computes.empty()) return kMinChart;
    const auto short_one = computes.begin() + static_cast<std::ptrdiff_t>(computes.size() / 4);
    std::nth_element(computes.begin(), short_one, computes.end());
    if (*short_one <= 0) return kMinChart;
    const double room = core::text_width(std::to_string(last), kNumberSize) + 5;
    return std::clamp(room * length_ / *short_one, kMinChart, kMaxChart);
  }

  /// Hatching of waits, and heads of arrows. Their names differ between the pictures of a page.
  void draw_definitions() {
    svg_.raw(fmt::format(
        "<defs><pattern id=\"hatch{0}\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
        "patternTransform=\"rotate(45)\"><rect class=\"wait\" width=\"6\" height=\"6\"/>"
        "<rect class=\"hatch\" width=\"1.4\" height=\"6\"/></pattern>\n",
        id_));
    for (const auto& [name, fill] : {std::pair("values", "f0"), std::pair("grads", "b0")}) {
      svg_.raw(fmt::format(
          "<marker id=\"{}{}\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"6\" "
          "markerHeight=\"6\" markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path class=\"{}\" "
          "d=\"M0,1 L8,4 L0,7 z\"/></marker>\n",
          name, id_, fill));
    }
    svg_.raw("</defs>\n");
  }

  void draw_title() {
    svg_.text(kMargin, kMargin + 14, timeline_.title,
              "class=\"ink\" font-size=\"20\" font-weight=\"bold\"");
    svg_.text(kMargin, kMargin + 36, headline(step_, timeline_), "class=\"mute\" font-size=\"13\"");
  }

  /// Whether any lane shown has an action of these kinds that takes time.
  bool shows(const std::vector<Kind>& kinds) const {
    const auto in = [&](const StepTimeline& step) {
      return std::any_of(step.lanes.begin(), step.lanes.end(), [&](const Lane& lane) {
        return std::any_of(kinds.begin(), kinds.end(),
                           [&](Kind kind) { return lane.time(kind) > 0; });
      });
    };
    return in(step_) || (below_ != nullptr && in(*below_));
  }

  bool reduces() const {
    return std::any_of(step_.lanes.begin(), step_.lanes.end(),
                       [](const Lane& lane) { return !lane.reductions.empty(); });
  }

  bool has_transfers(Kind kind) const {
    return std::any_of(step_.lanes.begin(), step_.lanes.end(), [&](const Lane& lane) {
      return std::any_of(lane.actions.begin(), lane.actions.end(),
                         [&](const TimedAction& timed) { return timed.action.kind == kind; });
    });
  }

  void draw_legend(double y) {
    double at = kMargin;
    const auto label = [&](const char* text) {
      svg_.text(at, y + 10, text, "class=\"mute\" font-size=\"11.5\"");
      at += core::text_width(text, 11.5) + 16;
    };
    const auto chip = [&](const std::string& attributes, const char* text) {
      svg_.rect(at, y, 16, 12, "rx=\"2\" " + attributes);
      at += 22;
      label(text);
    };
    const auto kind = [&](const char* name, const char* text, const std::vector<Kind>& kinds) {
      if (shows(kinds)) chip(fmt::format("class=\"{}\"", name), text);
    };
    kind("f0", "forward", {Kind::kForward});
    kind("b0", "backward", {Kind::kBackward});
    kind("i0", "input gradients", {Kind::kBackwardInput});
    kind("w0", "weight gradients", {Kind::kBackwardWeight});
    kind("send", "send", {Kind::kSendForward, Kind::kSendBackward});
    if (shows({Kind::kReduce}) || reduces()) chip("class=\"reduce\"", "reduce");
    if (shows({Kind::kRecvForward, Kind::kRecvBackward})) chip(hatched(), "waits for a message");
    chip("class=\"ground\"", "idle");
    if (peak_ > 0) chip("class=\"area\"", "activations kept");
    const auto arrow = [&](const char* name, const char* text) {
      svg_.raw(
          fmt::format("<path class=\"{0} arrow\" d=\"M{1:.1f},{2:.1f} h18\" fill=\"none\" "
                      "marker-end=\"url(#{0}{3})\"/>\n",
                      name, at, y + 6, id_));
      at += 24;
      label(text);
    };
    if (has_transfers(Kind::kSendForward)) arrow("values", "values");
    if (has_transfers(Kind::kSendBackward)) arrow("grads", "gradients");
    const bool several = std::any_of(step_.lanes.begin(), step_.lanes.end(),
                                     [](const Lane& lane) { return stages_of(lane).size() > 1; });
    if (several) label("darker: a rank's next stages");
  }

  std::string hatched() const { return fmt::format("fill=\"url(#hatch{})\"", id_); }

  /// The heading, the lanes and their axis; returns where they end.
  double draw_lanes(const StepTimeline& step, const char* heading, double y, bool small) {
    const double bar = small ? kSmallBar : kBar;
    const double pitch = bar + (small ? kSmallGap : memory_height() + kLaneGap);
    // The data are for the script of a page.
    svg_.raw(
        fmt::format("<g class=\"lanes\" data-left=\"{:.1f}\" data-right=\"{:.1f}\" "
                    "data-length=\"{:.3f}\" data-end=\"{:.3f}\" data-unit=\"{}\">\n",
                    left(), left() + chart_, length_, step.makespan,
                    timeline_.unit == TimeUnit::kSlots ? "slots" : "us"));
    svg_.text(kMargin, y + 14, heading, "class=\"ink\" font-size=\"13\" font-weight=\"bold\"");
    svg_.text(width() - kMargin, y + 14, "idle",
              "class=\"mute\" font-size=\"11.5\" text-anchor=\"end\"");
    const double top = y + kHeading;
    const double bottom = top + pitch * static_cast<double>(step.lanes.size());
    draw_axis(step, top - 6, bottom);
    for (size_t l = 0; l < step.lanes.size(); ++l) {
      draw_ground(step, step.lanes[l], top + pitch * static_cast<double>(l), bar, small);
    }
    if (!small) draw_transfers(step, top, pitch);
    for (size_t l = 0; l < step.lanes.size(); ++l) {
      draw_actions(step.lanes[l], top + pitch * static_cast<double>(l), bar);
      draw_reductions(step.lanes[l], top + pitch * static_cast<double>(l) + bar);
    }
    svg_.end_group();
    return bottom + kAxis;
  }

  void draw_axis(const StepTimeline& step, double top, double bottom) {
    if (length_ <= 0) return;
    const double apart = tick(length_, std::max(6.0, chart_ / 140));
    for (double time = 0; time <= length_ * 1.0001; time += apart) {
      svg_.line(x(time), top, x(time), bottom, "class=\"grid\"");
      svg_.text(x(time), bottom + 13, time == 0 ? "0" : tick_label(time),
                "class=\"mute\" font-size=\"10.5\" text-anchor=\"middle\"");
    }
    svg_.line(x(step.makespan), top, x(step.makespan), bottom,
              "class=\"end\" stroke-dasharray=\"3 3\"");
  }

  std::string tick_label(double time) const {
    return timeline_.unit == TimeUnit::kSlots ? fmt::format("{:.4g}", time)
                                              : format_duration(time, timeline_.unit);
  }

  /// What is behind the actions of a lane, and beside it.
  void draw_ground(const StepTimeline& step, const Lane& lane, double y, double bar, bool small) {
    const double middle = y + bar / 2 + 4;
    svg_.text(kMargin, small ? middle : y + 12, fmt::format("rank {}", lane.rank),
              "class=\"ink\" font-size=\"12\"");
    if (!small) {
      svg_.text(kMargin, y + 25, sublabel(lane), "class=\"mute\" font-size=\"10.5\"");
    }
    svg_.rect(left(), y, x(step.makespan) - left(), bar, "class=\"ground\" rx=\"2\"");
    svg_.text(width() - kMargin, middle, percent(step.idle(lane)),
              fmt::format("class=\"bad\" font-size=\"{}\" font-weight=\"bold\" "
                          "text-anchor=\"end\"",
                          small ? 11.5 : 13));
    if (!small && peak_ > 0) draw_memory(step, lane, y + bar + kMemoryGap);
  }

  std::string sublabel(const Lane& lane) const {
    const std::vector<int> stages = stages_of(lane);
    std::string text = replicas_ ? fmt::format("replica {}", lane.replica) : "stage";
    if (replicas_) return text;
    if (stages.size() > 1) text += 's';
    for (size_t i = 0; i < stages.size(); ++i) {
      text += fmt::format("{} {}", i > 0 ? "," : "", stages[i]);
    }
    return core::fit_text(text, kLabel - 8, 10.5);
  }

  void draw_memory(const StepTimeline& step, const Lane& lane, double y) {
    const double bottom = y + kMemory;
    const auto height = [&](double memory) { return bottom - memory / peak_ * (kMemory - 2); };
    std::string line = fmt::format("M{:.1f},{:.1f}", left(), bottom);
    double before = 0;
    for (const TimedAction& timed : lane.actions) {
      if (timed.memory == before) continue;
      before = timed.memory;
      line += fmt::format(" H{:.1f} V{:.1f}", x(timed.end), height(before));
    }
    line += fmt::format(" H{:.1f}", x(step.makespan));
    svg_.path(line + fmt::format(" V{:.1f} z", bottom), "class=\"area\"");
    svg_.path(line, "class=\"curve\" fill=\"none\"");
    svg_.text(width() - kMargin, bottom - 6,
              "keeps " + format_memory(lane.peak_memory(), timeline_.unit),
              "class=\"mute\" font-size=\"10.5\" text-anchor=\"end\"");
  }

  void draw_transfers(const StepTimeline& step, double top, double pitch) {
    for (const Transfer& transfer : transfers_of(step)) {
      const TimedAction& send = step.lanes[transfer.from_lane].actions[transfer.send];
      const TimedAction& receive = step.lanes[transfer.to_lane].actions[transfer.receive];
      const bool down = transfer.to_lane > transfer.from_lane;
      const double from = top + pitch * static_cast<double>(transfer.from_lane);
      const double to = top + pitch * static_cast<double>(transfer.to_lane);
      const double y1 = from + (down ? kBar : 0), y2 = to + (down ? 0 : kBar);
      const double bend = (y2 - y1) * 0.4;
      const char* name = send.action.is_backward() ? "grads" : "values";
      svg_.raw(
          fmt::format("<path data-m=\"{0}\" class=\"{1} arrow\" d=\"M{2:.1f},{3:.1f} "
                      "C{2:.1f},{4:.1f} {5:.1f},{6:.1f} {5:.1f},{7:.1f}\" fill=\"none\" "
                      "marker-end=\"url(#{1}{8})\"/>\n",
                      send.action.microbatch, name, x(send.end), y1, y1 + bend, x(receive.end),
                      y2 - bend, y2, id_));
    }
  }

  void draw_actions(const Lane& lane, double y, double bar) {
    const std::vector<int> stages = stages_of(lane);
    for (size_t i = 0; i < lane.actions.size(); ++i) {
      const TimedAction& timed = lane.actions[i];
      if (timed.end <= timed.start) continue;
      const auto shade = std::min<std::ptrdiff_t>(
          std::find(stages.begin(), stages.end(), timed.action.stage) - stages.begin(),
          kShades - 1);
      draw_action(timed, lane.bytes.empty() ? 0 : lane.bytes[i], static_cast<int>(shade), y, bar);
    }
  }

  void draw_reductions(const Lane& lane, double y) {
    const TimeUnit unit = timeline_.unit;
    for (size_t i = 0; i < lane.reductions.size(); ++i) {
      const TimedReduction& timed = lane.reductions[i];
      const std::string text = fmt::format(
          "{}\n{}, from {} to {}\n{}", describe_reduction(i, lane.reductions.size()),
          format_duration(timed.end - timed.start, unit), format_duration(timed.start, unit),
          format_duration(timed.end, unit), format_memory(static_cast<double>(timed.bytes), unit));
      svg_.raw(fmt::format("<g data-m=\"-1\"><title>{}</title>", core::escape_xml(text)));
      svg_.rect(x(timed.start), y + 0.5,
                std::max(kLeastWidth, x(timed.end) - x(timed.start) - kLeastWidth), kReduction,
                "class=\"reduce\"");
      svg_.raw("</g>\n");
    }
  }

  void draw_action(const TimedAction& timed, int64_t bytes, int shade, double y, double bar) {
    const Action& action = timed.action;
    const double width = std::max(kLeastWidth, x(timed.end) - x(timed.start));
    const std::string fill = action.is_recv() ? hatched()
                             : action.is_compute()
                                 ? fmt::format("class=\"{}{}\"", class_of(action), shade)
                                 : fmt::format("class=\"{}\"", class_of(action));
    svg_.raw(fmt::format("<g data-m=\"{}\"><title>{}</title>", action.microbatch,
                         core::escape_xml(tooltip(timed, bytes))));
    // A hair of ground keeps neighbours apart.
    svg_.rect(x(timed.start), y, width > 4 ? width - 0.7 : width, bar, "rx=\"1.5\" " + fill);
    const std::string number = fmt::format("{}", action.microbatch);
    if (action.is_compute() && width >= core::text_width(number, kNumberSize) + 2) {
      svg_.text(x(timed.start) + width / 2, y + bar / 2 + 3.8, number, "class=\"num\"");
    }
    svg_.raw("</g>\n");
  }

  std::string tooltip(const TimedAction& timed, int64_t bytes) const {
    const TimeUnit unit = timeline_.unit;
    std::string text =
        fmt::format("{}: {}\n{}, from {} to {}", to_string(timed.action), describe(timed.action),
                    format_duration(timed.end - timed.start, unit),
                    format_duration(timed.start, unit), format_duration(timed.end, unit));
    if (bytes > 0) text += "\n" + format_memory(static_cast<double>(bytes), unit);
    if (timed.memory > 0) {
      text += "\nthe rank keeps " + format_memory(timed.memory, unit) + " after it";
    }
    return text;
  }

  const Timeline& timeline_;
  const StepTimeline& step_;
  const StepTimeline* below_ = nullptr;
  const size_t id_;
  double peak_ = 0;    // memory of any lane
  double length_ = 0;  // of the time axis
  double chart_ = 0;   // its width
  bool replicas_ = false;
  core::Svg svg_;
};

}  // namespace

std::string picture_style() {
  return fmt::format(".num{{font-size:{}px;font-weight:bold;text-anchor:middle}}", kNumberSize) +
         ".arrow{stroke-width:1;stroke-opacity:.7}.grid,.end,.curve{stroke-width:1}" +
         rules(/*dark=*/false) + "@media (prefers-color-scheme:dark){" + rules(/*dark=*/true) + "}";
}

std::string to_svg(const Timeline& timeline, size_t index, bool with_style) {
  const std::vector<StepTimeline> steps = shown_steps(timeline);
  SMP_INTERNAL_ASSERT(index < steps.size(), "timeline: expected a step below ", steps.size(),
                      ", got ", index);
  return Picture(timeline, steps[index], index).draw(with_style);
}

}  // namespace smp::pipeline
