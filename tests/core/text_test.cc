// SPDX-License-Identifier: Apache-2.0
// Foreign text in messages, and messages as a whole.
#include "core/text.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/error_of.h"

namespace smp {
namespace {

using core::printable;

TEST(Printable, LeavesWhatIsShownAsItIs) {
  for (const std::string text :
       {"", "net.0.weight", "a \"b\" \\ '", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, EscapesWhatATerminalActsOn) {
  EXPECT_EQ(printable("a\nb\r\tc"), "a\\nb\\r\\tc");
  EXPECT_EQ(printable("\x1b[31mred\x7f"), "\\x1b[31mred\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  // CSI as one character, a line separator, a change of direction, no character.
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m \xe2\x80\xa8 \xe2\x80\xae \xe2\x81\xa6 \xef\xbf\xbf"),
            "\\x9b31m \\u2028 \\u202e \\u2066 \\uffff");
}

TEST(Printable, EscapesWhatIsNoUtf8) {
  EXPECT_EQ(printable("\xff"), "\\xff");
  EXPECT_EQ(printable("a\xc3"), "a\\xc3");                           // cut off
  EXPECT_EQ(printable("\xc3(\x80"), "\\xc3(\\x80");                  // goes on without a beginning
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // longer than need be
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // likewise
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // half of a pair of UTF-16
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond Unicode
}

TEST(Printable, ShortensAndSaysHowLongItWas) {
  EXPECT_EQ(printable("abc", 3), "abc");
  EXPECT_EQ(printable("abcd", 3), "abc... (4 bytes)");
  EXPECT_EQ(printable(std::string(1 << 20, 'x'), 5), "xxxxx... (1048576 bytes)");
  // A character of two bytes is not cut in the middle.
  EXPECT_EQ(printable("\xc3\xa4\xc3\xa4", 3), "\xc3\xa4... (4 bytes)");
  EXPECT_EQ(printable("\xc3\xa4\xc3\xa4", 4), "\xc3\xa4\xc3\xa4");
  // Escapes count as they are shown.
  EXPECT_EQ(printable("\n\n\n", 4), "\\n\\n... (3 bytes)");
}

TEST(Printable, TwiceIsAsOnce) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string once = printable(std::string("a") + static_cast<char>(byte));
    EXPECT_EQ(printable(once), once);
  }
}

TEST(Printable, ListsHaveAnEnd) {
  EXPECT_EQ(core::indented(std::vector<std::string>{}), "");
  EXPECT_EQ(core::indented(std::vector<std::string>{"a", "b"}, 2), "\n  a\n  b");
  EXPECT_EQ(core::indented(std::vector<std::string>{"a", "b", "c"}, 1), "\n  a\n  and 2 more");
}

TEST(Messages, ErrorsHaveLinesAndNothingElseThatATerminalActsOn) {
  EXPECT_EQ(
      testing::error_of<ConfigError>([] { core::fail<ConfigError>("a:\n  b", "\x1b[31m", '\r'); }),
      "[smp] a:\n  b\\x1b[31m\\r");
}

TEST(Messages, ErrorsHaveAnEnd) {
  const std::string text = testing::error_of<ConfigError>(
      [] { core::fail<ConfigError>("begin ", std::string(1 << 20, 'x'), " end"); });
  EXPECT_LT(text.size(), 33u << 10);
  EXPECT_EQ(text.substr(0, 13), "[smp] begin x");
  EXPECT_EQ(text.substr(text.size() - 5), "x end");
  EXPECT_NE(text.find("x ... (1015818 bytes left out) ... x"), std::string::npos);
}

TEST(Messages, AnErrorStandsInAnotherWithoutItsPrefix) {
  EXPECT_EQ(core::text_without_prefix(ConfigError("[smp] what")), "what");
  EXPECT_EQ(core::text_without_prefix(c10::Error("what", c10::Backtrace())), "what");
}

}  // namespace
}  // namespace smp
