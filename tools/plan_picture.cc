// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "core/svg.h"
#include "partitioner/format.h"
#include "tools/plan_boxes.h"

namespace smp::tools {
namespace {

using graph::Graph;
using partitioner::format_bytes;
using partitioner::format_time;

// All lengths are in pixels.
constexpr double kMargin = 28;
constexpr double kTitleHeight = 62;
constexpr double kColumn = 216;
constexpr double kGutter = 108;
constexpr double kPadding = 14;
constexpr double kArcSpace = 16;  // left of the boxes, for what skips boxes of the stage
constexpr double kHeader = 74;
constexpr double kBox = 42;
constexpr double kBoxGap = 14;
constexpr double kLane = 24;  // height of a line that passes above or below other stages
constexpr double kLaneStep = 6;
constexpr double kChartRow = 26;
constexpr double kChartLabel = 84;
constexpr double kMinChart = 620;
constexpr double kLegend = 34;

constexpr const char* kInk = "#1f2933";
constexpr const char* kMuted = "#616e7c";
constexpr const char* kFlow = "#52606d";
constexpr const char* kSkip = "#7c3aed";
constexpr const char* kTied = "#d9480f";

/// The shades of one partition, from the column's ground to lines and bars.
struct Tone {
  const char* ground;
  const char* box;
  const char* bar;
  const char* ink;
};

constexpr std::array<Tone, 8> kTones = {{
    {"#eef4fc", "#d6e4f7", "#4a83c9", "#23538f"},
    {"#edf7f0", "#d0ead8", "#3c9a63", "#226a40"},
    {"#fdf4e7", "#fae2bf", "#d3862a", "#8f5510"},
    {"#fbeef1", "#f4d3da", "#c44f6a", "#8c2b43"},
    {"#eaf6f7", "#c9e7ea", "#2f939d", "#1b646b"},
    {"#f3eefa", "#e0d4f3", "#8059bd", "#563690"},
    {"#f6f6e6", "#e7e6bd", "#8f8a2b", "#625e17"},
    {"#f0f2f4", "#dbe0e5", "#667483", "#414d59"},
}};

const Tone& tone_of(int rank) { return kTones[static_cast<size_t>(rank) % kTones.size()]; }

std::string font(double size, const char* fill, const char* more = "") {
  return fmt::format("font-size=\"{:g}\" fill=\"{}\" {}", size, fill, more);
}

/// A line of an arrow from `from` to `to` whose ends are horizontal.
std::string curve(double x1, double y1, double x2, double y2) {
  const double bend = std::max(24.0, std::abs(x2 - x1) * 0.45);
  return fmt::format("M{:.1f},{:.1f} C{:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f}", x1, y1, x1 + bend,
                     y1, x2 - bend, y2, x2, y2);
}

/// Right, up or down to `lane`, along it, back, and right again; with round corners.
std::string detour(double x1, double y1, double out, double lane, double in, double x2, double y2) {
  const double r = 7;
  const double leave = lane < y1 ? -r : r;
  const double come = lane < y2 ? r : -r;
  return fmt::format(
      "M{:.1f},{:.1f} H{:.1f} q{:.1f},0 {:.1f},{:.1f} V{:.1f} q0,{:.1f} {:.1f},{:.1f} H{:.1f} "
      "q{:.1f},0 {:.1f},{:.1f} V{:.1f} q0,{:.1f} {:.1f},{:.1f} H{:.1f}",
      x1, y1, out - r, r, r, leave, lane - leave, leave, r, leave, in - r, r, r, come, y2 - come,
      come, r, come, x2);
}

/// A value that several stages read: from its owner to one of them.
struct Tie {
  int from = 0;  // boxes
  int to = 0;
  std::string label;
};

/// A line that goes around the columns between its ends.
struct Lane {
  int from = 0;  // boxes
  int to = 0;
  int number = 0;  // 0: the nearest to the columns
};

class Picture {
 public:
  Picture(const Graph& graph, const Forecast& forecast, std::string title)
      : graph_(graph),
        forecast_(forecast),
        title_(std::move(title)),
        boxes_(make_boxes(graph, forecast.plan)) {
    find_edges();
    find_ties();
    lay_out();
  }

  std::string draw() {
    draw_markers();
    draw_title();
    for (int s = 0; s < stages(); ++s) draw_column(s);
    for (const BoxEdge& edge : boxes_.inside) draw_inside(edge);
    for (size_t b = 0; b < boxes_.boxes.size(); ++b) draw_box(static_cast<int>(b));
    draw_neighbours();
    draw_skips();
    draw_ties();
    draw_chart();
    draw_legend();
    return svg_.finish(width_, height_, title_);
  }

 private:
  int stages() const { return forecast_.plan.stages(); }
  int rank_of(int stage) const { return forecast_.plan.rank_of_stage[stage]; }
  const Box& box(int index) const { return boxes_.boxes[index]; }
  double column_x(int stage) const { return kMargin + stage * (kColumn + kGutter); }
  double left_of(int index) const { return column_x(box(index).stage) + kPadding + kArcSpace; }
  double right_of(int index) const { return column_x(box(index).stage) + kColumn - kPadding; }
  double middle_of(int index) const { return box_y_[index] + kBox / 2; }

  void find_edges() {
    for (const BoxEdge& edge : boxes_.between) {
      const bool skips = box(edge.to).stage > box(edge.from).stage + 1;
      (skips ? skips_ : neighbours_).push_back(edge);
      largest_ = std::max(largest_, edge.bytes);
    }
    std::vector<Lane> lanes;
    for (const BoxEdge& edge : skips_) lanes.push_back({edge.from, edge.to, 0});
    skip_lanes_ = number(std::move(lanes), &skip_lane_count_);
  }

  void find_ties() {
    std::vector<Lane> lanes;
    for (const auto& replica : forecast_.plan.replicas) {
      const auto from = boxes_.touching(graph_, replica.value, replica.owner);
      const auto to = boxes_.touching(graph_, replica.value, replica.stage);
      if (from.empty() || to.empty()) continue;
      const graph::Value& value = graph_.values[replica.value];
      ties_.push_back({from.front(), to.front(),
                       fmt::format("{} {}", value.name, format_bytes(value.meta.nbytes()))});
      lanes.push_back({from.front(), to.front(), 0});
    }
    tie_lanes_ = number(std::move(lanes), &tie_lane_count_);
  }

  /// Short lines run next to the columns, and none over another.
  std::vector<Lane> number(std::vector<Lane> lanes, int* count) const {
    const auto span = [&](const Lane& lane) {
      return std::minmax(box(lane.from).stage, box(lane.to).stage);
    };
    std::vector<size_t> order(lanes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return span(lanes[a]).second - span(lanes[a]).first <
             span(lanes[b]).second - span(lanes[b]).first;
    });
    std::vector<std::vector<std::pair<int, int>>> taken;
    for (const size_t i : order) {
      const std::pair<int, int> mine = span(lanes[i]);
      size_t n = 0;
      while (n < taken.size() &&
             std::any_of(taken[n].begin(), taken[n].end(), [&](const auto& other) {
               return mine.first < other.second && other.first < mine.second;
             })) {
        ++n;
      }
      if (n == taken.size()) taken.emplace_back();
      taken[n].push_back(mine);
      lanes[i].number = static_cast<int>(n);
    }
    *count = static_cast<int>(taken.size());
    return lanes;
  }

  void lay_out() {
    panel_y_ = kMargin + kTitleHeight + kLane * skip_lane_count_;
    std::vector<int> in_column(stages(), 0);
    for (const Box& of : boxes_.boxes) {
      box_y_.push_back(panel_y_ + kHeader + in_column[of.stage]++ * (kBox + kBoxGap));
    }
    const int most = *std::max_element(in_column.begin(), in_column.end());
    panel_height_ = kHeader + std::max(1, most) * (kBox + kBoxGap) + kPadding - kBoxGap;
    chart_y_ = panel_y_ + panel_height_ + 20 + kLane * tie_lane_count_;
    const double columns = stages() * kColumn + (stages() - 1) * kGutter;
    width_ = 2 * kMargin + std::max(columns, kMinChart);
    height_ = chart_y_ + 34 + forecast_.ranks() * kChartRow + 30 + kLegend + kMargin / 2;
    for (const Box& of : boxes_.boxes) largest_share_ = std::max(largest_share_, of.share);
  }

  /// Arrow heads, one for each colour: SVG cannot take over a line's colour.
  void draw_markers() {
    svg_.raw("<defs>\n");
    for (const char* color : {kFlow, kSkip, kTied}) {
      svg_.raw(fmt::format(
          "<marker id=\"a{}\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" "
          "markerHeight=\"7\" markerUnits=\"userSpaceOnUse\" orient=\"auto-start-reverse\">"
          "<path d=\"M0,0.5 L8,4 L0,7.5 z\" fill=\"{}\"/></marker>\n",
          color + 1, color));
    }
    svg_.raw("</defs>\n");
  }

  void draw_title() {
    svg_.text(kMargin, kMargin + 16, title_, font(20, kInk, "font-weight=\"bold\""));
    const auto& step = forecast_.model;
    svg_.text(kMargin, kMargin + 38,
              fmt::format("{} operators in {} stage{}, {} microbatch{}: a step of {} predicted, "
                          "{:.1f}% of the partitions' time idle",
                          graph_.operators.size(), stages(), stages() == 1 ? "" : "s",
                          step.microbatches(), step.microbatches() == 1 ? "" : "es",
                          format_time(forecast_.step_us()), 100 * forecast_.simulation.bubble()),
              font(13, kMuted));
  }

  /// A bar for `share` of 1 with its meaning before and its value behind.
  void draw_meter(double x, double y, const char* what, const std::string& value, double share,
                  const Tone& tone) {
    constexpr double kLabel = 52, kValue = 62;
    const double length = kColumn - 2 * kPadding - kLabel - kValue;
    svg_.text(x, y + 7, what, font(11, kMuted));
    svg_.rect(x + kLabel, y, length, 7, "rx=\"3.5\" fill=\"#ffffff\"");
    svg_.rect(x + kLabel, y, std::max(2.0, length * share), 7,
              fmt::format("rx=\"3.5\" fill=\"{}\"", tone.bar));
    svg_.text(x + kColumn - 2 * kPadding, y + 7, value, font(11, kInk, "text-anchor=\"end\""));
  }

  void draw_column(int stage) {
    const Tone& tone = tone_of(rank_of(stage));
    const double x = column_x(stage);
    const auto& predicted = forecast_.prediction.stages[stage];
    double most_time = 0;
    int64_t most_memory = 0;
    for (const auto& other : forecast_.prediction.stages) {
      most_time = std::max(most_time, other.time_us());
      most_memory = std::max(most_memory, other.memory());
    }
    svg_.rect(x, panel_y_, kColumn, panel_height_,
              fmt::format("rx=\"10\" fill=\"{}\"", tone.ground));
    svg_.text(x + kPadding, panel_y_ + 22, fmt::format("Stage {}", stage),
              font(15, tone.ink, "font-weight=\"bold\""));
    svg_.text(x + kColumn - kPadding, panel_y_ + 22, fmt::format("partition {}", rank_of(stage)),
              font(12, kMuted, "text-anchor=\"end\""));
    draw_meter(x + kPadding, panel_y_ + 35, "time", format_time(predicted.time_us()),
               most_time > 0 ? predicted.time_us() / most_time : 0, tone);
    draw_meter(x + kPadding, panel_y_ + 51, "memory", format_bytes(predicted.memory()),
               most_memory > 0
                   ? static_cast<double>(predicted.memory()) / static_cast<double>(most_memory)
                   : 0,
               tone);
  }

  /// What the browser shows when the pointer rests on a box.
  std::string tooltip(const Box& of) const {
    constexpr int kShown = 24;
    std::string text = of.name;
    for (int i = of.first; i <= std::min(of.last, of.first + kShown - 1); ++i) {
      const auto& op = graph_.operators[i];
      text += fmt::format("\n{} {} {}", i, op.name(), format_time(op.cost.forward_us));
    }
    if (of.operators() > kShown) text += fmt::format("\nand {} more", of.operators() - kShown);
    return text;
  }

  void draw_box(int index) {
    const Box& of = box(index);
    const Tone& tone = tone_of(rank_of(of.stage));
    const double x = left_of(index), y = box_y_[index], width = right_of(index) - x;
    svg_.begin_group(tooltip(of));
    svg_.rect(x, y, width, kBox,
              fmt::format("rx=\"6\" fill=\"{}\" stroke=\"{}\" stroke-opacity=\"0.45\"", tone.box,
                          tone.bar));
    svg_.text(x + 9, y + 16, core::fit_text(of.name, width - 18, 12),
              font(12, kInk, "font-weight=\"600\""));
    svg_.text(x + 9, y + 30,
              fmt::format("{} operator{}", of.operators(), of.operators() == 1 ? "" : "s"),
              font(10.5, kMuted));
    svg_.text(x + width - 9, y + 30, fmt::format("{:.1f}%", 100 * of.share),
              font(10.5, kMuted, "text-anchor=\"end\""));
    if (largest_share_ > 0) {
      svg_.rect(x + 9, y + 35, std::max(1.0, (width - 18) * of.share / largest_share_), 3,
                fmt::format("rx=\"1.5\" fill=\"{}\"", tone.bar));
    }
    svg_.end_group();
  }

  /// Data that goes from box to box: down to the next one, or around those between.
  void draw_inside(const BoxEdge& edge) {
    const std::string style = fmt::format(
        "fill=\"none\" stroke=\"{0}\" stroke-opacity=\"0.55\" marker-end=\"url(#a{1})\"", kFlow,
        kFlow + 1);
    const double x = left_of(edge.from);
    if (edge.to == edge.from + 1) {
      const double middle = (x + right_of(edge.from)) / 2;
      svg_.line(middle, box_y_[edge.from] + kBox, middle, box_y_[edge.to] - 1, style);
      return;
    }
    const double out = x - std::min(kArcSpace + kPadding - 5, 7 + 2.5 * (edge.to - edge.from));
    svg_.path(fmt::format("M{0:.1f},{1:.1f} C{2:.1f},{1:.1f} {2:.1f},{3:.1f} {0:.1f},{3:.1f}", x,
                          middle_of(edge.from) + 8, out, middle_of(edge.to) - 8),
              style);
  }

  std::string edge_style(const BoxEdge& edge, const char* color) const {
    const double thick = 1.2 + 2.4 * std::sqrt(static_cast<double>(edge.bytes) /
                                               static_cast<double>(std::max<int64_t>(largest_, 1)));
    const bool back = edge.gradient_bytes > 0;
    return fmt::format(
        "fill=\"none\" stroke=\"{0}\" stroke-width=\"{1:.1f}\" marker-end=\"url(#a{2})\" {3}",
        color, thick, color + 1,
        back ? fmt::format("marker-start=\"url(#a{})\"", color + 1) : "stroke-dasharray=\"5 3\"");
  }

  static std::string edge_label(const BoxEdge& edge) {
    return edge.tensors == 1 ? format_bytes(edge.bytes)
                             : fmt::format("{} in {}", format_bytes(edge.bytes), edge.tensors);
  }

  /// On a white ground, so that it can lie on lines.
  void draw_label(double x, double y, const std::string& label, const char* color) {
    const double width = core::text_width(label, 11) + 8;
    svg_.rect(x - width / 2, y - 8, width, 16, "rx=\"4\" fill=\"#ffffff\" fill-opacity=\"0.92\"");
    svg_.text(x, y + 4, label, font(11, color, "text-anchor=\"middle\" font-weight=\"600\""));
  }

  /// Edges from each stage to the next; their labels are kept apart.
  void draw_neighbours() {
    std::map<int, std::vector<std::pair<double, std::string>>> labels;  // by stage
    for (const BoxEdge& edge : neighbours_) {
      const double y1 = middle_of(edge.from), y2 = middle_of(edge.to);
      svg_.path(curve(right_of(edge.from) + 3, y1, left_of(edge.to) - 3, y2),
                edge_style(edge, kFlow));
      labels[box(edge.from).stage].emplace_back((y1 + y2) / 2, edge_label(edge));
    }
    for (auto& [stage, of_gutter] : labels) {
      std::sort(of_gutter.begin(), of_gutter.end());
      double free = 0;
      for (const auto& [y, label] : of_gutter) {
        const double at = std::max(y, free);
        draw_label(column_x(stage) + kColumn + kGutter / 2, at, label, kInk);
        free = at + 18;
      }
    }
  }

  /// One line around the columns between, and where its label goes. Lines of one gutter run side
  /// by side.
  std::pair<double, double> draw_lane(const Lane& lane, bool above, const std::string& style) {
    const bool forward = box(lane.from).stage < box(lane.to).stage;
    const double beside = 12 + kLaneStep * lane.number;
    const double y = above ? panel_y_ - 14 - kLane * lane.number
                           : panel_y_ + panel_height_ + 16 + kLane * lane.number;
    const double out = column_x(box(lane.from).stage) + kColumn + beside;
    const double in = column_x(box(lane.to).stage) - beside;
    const double shift = above ? -9 : 9;  // apart from the lines to the neighbours
    if (forward) {
      svg_.path(detour(right_of(lane.from) + 3, middle_of(lane.from) + shift, out, y, in,
                       left_of(lane.to) - 3, middle_of(lane.to) + shift),
                style);
      return {(out + in) / 2, y};
    }
    // Back to an earlier stage: the same way, told from its other end.
    const double other_out = column_x(box(lane.to).stage) + kColumn + beside;
    const double other_in = column_x(box(lane.from).stage) - beside;
    svg_.path(detour(right_of(lane.to) + 3, middle_of(lane.to) + shift, other_out, y, other_in,
                     left_of(lane.from) - 3, middle_of(lane.from) + shift),
              style);
    return {(other_out + other_in) / 2, y};
  }

  void draw_skips() {
    std::vector<std::pair<std::pair<double, double>, std::string>> labels;
    for (size_t i = 0; i < skips_.size(); ++i) {
      labels.emplace_back(draw_lane(skip_lanes_[i], /*above=*/true, edge_style(skips_[i], kSkip)),
                          edge_label(skips_[i]));
    }
    for (const auto& [at, label] : labels) draw_label(at.first, at.second, label, kSkip);
  }

  void draw_ties() {
    const std::string style = fmt::format(
        "fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" stroke-dasharray=\"2 3\"", kTied);
    std::vector<std::pair<std::pair<double, double>, std::string>> labels;
    for (size_t i = 0; i < ties_.size(); ++i) {
      labels.emplace_back(draw_lane(tie_lanes_[i], /*above=*/false, style), ties_[i].label);
    }
    for (const auto& [at, label] : labels) draw_label(at.first, at.second, label, kTied);
  }

  /// 1, 2 or 5 times a power of ten, such that an axis of `length` has about five of them.
  static double tick(double length) {
    const double rough = length / 5;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (rough <= factor * power) return factor * power;
    }
    return 10 * power;
  }

  void draw_chart() {
    const double x = kMargin + kChartLabel, width = width_ - 2 * kMargin - kChartLabel;
    const double top = chart_y_ + 34, step = forecast_.step_us();
    const double bottom = top + forecast_.ranks() * kChartRow;
    svg_.text(kMargin, chart_y_ + 18, "The step, as predicted",
              font(14, kInk, "font-weight=\"bold\""));
    svg_.text(kMargin + 200, chart_y_ + 18,
              graph_.trains() ? "full colour: forward, hatched: backward, with the microbatch"
                              : "with the microbatch",
              font(11, kMuted));
    if (step <= 0) return;
    draw_hatching();
    const double scale = width / step;
    for (double t = 0; t <= step * 1.0001; t += tick(step)) {
      svg_.line(x + t * scale, top - 2, x + t * scale, bottom + 4, "stroke=\"#cbd2d9\"");
      svg_.text(x + t * scale, bottom + 17, t == 0 ? "0" : format_time(t),
                font(10.5, kMuted, "text-anchor=\"middle\""));
    }
    for (int r = 0; r < forecast_.ranks(); ++r) draw_timeline(r, x, top + r * kChartRow, scale);
  }

  void draw_hatching() {
    svg_.raw("<defs>\n");
    for (int r = 0; r < std::min<int>(forecast_.ranks(), kTones.size()); ++r) {
      svg_.raw(fmt::format(
          "<pattern id=\"h{0}\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><rect width=\"5\" height=\"5\" fill=\"{1}\"/>"
          "<rect width=\"1.6\" height=\"5\" fill=\"{2}\"/></pattern>\n",
          r, tone_of(r).box, tone_of(r).bar));
    }
    svg_.raw("</defs>\n");
  }

  void draw_timeline(int rank, double x, double y, double scale) {
    const Tone& tone = tone_of(rank);
    svg_.text(kMargin, y + 15, fmt::format("partition {}", rank), font(12, tone.ink));
    for (const auto& timed : forecast_.simulation.timeline[rank]) {
      if (!timed.action.is_compute()) continue;
      const double width = (timed.end - timed.start) * scale;
      const bool back = timed.action.is_backward();
      const std::string fill =
          back ? fmt::format("url(#h{})", static_cast<size_t>(rank) % kTones.size()) : tone.bar;
      svg_.rect(x + timed.start * scale, y + 2, std::max(0.5, width), kChartRow - 6,
                fmt::format("fill=\"{}\" stroke=\"#ffffff\" stroke-width=\"0.6\"", fill));
      const std::string number = fmt::format("{}", timed.action.microbatch);
      if (width < core::text_width(number, 10) + 3) continue;
      svg_.text(
          x + (timed.start + timed.end) / 2 * scale, y + 15.5, number,
          font(10, back ? tone.ink : "#ffffff", "text-anchor=\"middle\" font-weight=\"bold\""));
    }
  }

  void draw_legend() {
    double x = kMargin;
    const double y = height_ - kMargin / 2 - 12;
    const auto entry = [&](const std::string& style, const char* label) {
      svg_.line(x, y, x + 34, y, style);
      svg_.text(x + 42, y + 4, label, font(11, kMuted));
      x += 42 + core::text_width(label, 11) + 18;
    };
    BoxEdge both{0, 0, 1, largest_, 1}, forward{0, 0, 1, largest_, 0};
    const auto any = [](const std::vector<BoxEdge>& edges, bool back) {
      return std::any_of(edges.begin(), edges.end(),
                         [&](const BoxEdge& edge) { return (edge.gradient_bytes > 0) == back; });
    };
    if (any(neighbours_, true))
      entry(edge_style(both, kFlow), "sent per microbatch, gradient back");
    if (any(neighbours_, false)) entry(edge_style(forward, kFlow), "forward only");
    if (any(skips_, true)) entry(edge_style(both, kSkip), "skips a stage");
    if (any(skips_, false)) entry(edge_style(forward, kSkip), "skips a stage, forward only");
    if (!ties_.empty()) {
      entry(fmt::format("stroke=\"{}\" stroke-width=\"1.5\" stroke-dasharray=\"2 3\"", kTied),
            "tied: one parameter, read by several stages");
    }
  }

  const Graph& graph_;
  const Forecast& forecast_;
  const std::string title_;
  const Boxes boxes_;
  std::vector<BoxEdge> neighbours_, skips_;
  std::vector<Tie> ties_;
  std::vector<Lane> skip_lanes_, tie_lanes_;
  int skip_lane_count_ = 0, tie_lane_count_ = 0;
  int64_t largest_ = 0;
  double largest_share_ = 0;
  std::vector<double> box_y_;
  double panel_y_ = 0, panel_height_ = 0, chart_y_ = 0, width_ = 0, height_ = 0;
  core::Svg svg_;
};

}  // namespace

std::string to_svg(const Graph& graph, const Forecast& forecast, const std::string& title) {
  return Picture(graph, forecast, title).draw();
}

}  // namespace smp::tools
