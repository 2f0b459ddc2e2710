// SPDX-License-Identifier: Apache-2.0
#include "core/symbols.h"

#include <c10/util/Type.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>

#include "core/descriptor.h"
#include "core/text.h"

namespace smp::core {
namespace {

// A file that a process has mapped, from `begin` to `end` the code from `offset` on.
struct Mapping {
  uint64_t begin = 0, end = 0, offset = 0;
  std::string path;

  std::string file() const { return path.substr(path.rfind('/') + 1); }
};

std::vector<Mapping> mappings_of(pid_t process) {
  std::vector<Mapping> mappings;
  std::ifstream in("/proc/" + std::to_string(process) + "/maps");
  for (std::string line; std::getline(in, line);) {
    unsigned long begin = 0, end = 0, offset = 0;
    char rights[5] = "";
    int path_at = 0;
    const int read = std::sscanf(line.c_str(), "%lx-%lx %4s %lx %*s %*s %n", &begin, &end, rights,
                                 &offset, &path_at);
    if (read < 4 || rights[2] != 'x') continue;
    mappings.push_back({begin, end, offset, line.substr(static_cast<size_t>(path_at))});
  }
  return mappings;
}

// The symbols of an ELF file. A malformed file has none. Read and not mapped: memory of a file that
// becomes shorter, as when a program is built again, is a SIGBUS.
class SymbolFile {
 public:
  explicit SymbolFile(const std::string& path)
      : file_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    struct stat file {};
    if (!file_ || fstat(file_.get(), &file) != 0 || !S_ISREG(file.st_mode)) return;
    bytes_ = static_cast<size_t>(file.st_size);
    const auto headers = read<ElfW(Ehdr)>(0, 1);
    if (headers.empty()) return;
    const ElfW(Ehdr)& header = headers.front();
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != (sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32)) {
      return;
    }
    segments_ = read<ElfW(Phdr)>(header.e_phoff, header.e_phnum);
    sections_ = read<ElfW(Shdr)>(header.e_shoff, header.e_shnum);
  }

  // The address of the part at that offset in the file, before it is moved as a whole.
  std::optional<uint64_t> address_of(uint64_t offset) const {
    for (const auto& segment : segments_) {
      if (segment.p_type == PT_LOAD && offset >= segment.p_offset &&
          offset - segment.p_offset < segment.p_filesz) {
        return offset - segment.p_offset + segment.p_vaddr;
      }
    }
    return std::nullopt;
  }

  // The mangled name of the function at an address; empty without one.
  std::string function_at(uint64_t address) {
    for (const Table& table : tables()) {
      const auto& symbols = table.symbols;
      const auto found = std::find_if(symbols.begin(), symbols.end(), [&](const auto& symbol) {
        const bool is_function = (symbol.st_info & 0xf) == STT_FUNC && symbol.st_shndx != SHN_UNDEF;
        return is_function && address >= symbol.st_value &&
               address - symbol.st_value < symbol.st_size;
      });
      if (found != symbols.end()) return text(sections_[table.strings], found->st_name);
    }
    return "";
  }

 private:
  struct Table {
    std::vector<ElfW(Sym)> symbols;
    size_t strings;  // the section with their names
  };

  const std::vector<Table>& tables() {
    if (has_tables_) return tables_;
    has_tables_ = true;
    for (const auto& section : sections_) {
      if (section.sh_type != SHT_SYMTAB && section.sh_type != SHT_DYNSYM) continue;
      if (section.sh_link >= sections_.size()) continue;
      const size_t count = section.sh_size / sizeof(ElfW(Sym));
      tables_.push_back({read<ElfW(Sym)>(section.sh_offset, count), section.sh_link});
    }
    return tables_;
  }

  // Nothing where the file does not have all of it.
  template <class T>
  std::vector<T> read(uint64_t offset, size_t count) const {
    if (offset > bytes_ || count > (bytes_ - offset) / sizeof(T)) return {};
    std::vector<T> values(count);
    const auto wanted = static_cast<ssize_t>(count * sizeof(T));
    const auto begin = static_cast<off_t>(offset);
    if (read_fully(file_.get(), values.data(), count * sizeof(T), begin) != wanted) return {};
    return values;
  }

  std::string text(const ElfW(Shdr) & strings, uint64_t offset) const {
    constexpr size_t kLongest = size_t{64} << 10;
    if (offset >= strings.sh_size) return "";
    const auto name = read<char>(strings.sh_offset + offset,
                                 std::min<size_t>(kLongest, strings.sh_size - offset));
    return {name.data(), strnlen(name.data(), name.size())};
  }

  const Descriptor file_;
  size_t bytes_ = 0;
  std::vector<ElfW(Phdr)> segments_;
  std::vector<ElfW(Shdr)> sections_;
  std::vector<Table> tables_;
  bool has_tables_ = false;
};

// A C function's name may be one of a type to the demangler.
std::string demangled(const std::string& name) {
  return name.compare(0, 2, "_Z") == 0 ? c10::demangle(name.c_str()) : name;
}

std::string with_address(const std::string& file, uint64_t address) {
  char text[32] = "";
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
  return file.empty() ? text : file + "+" + text;
}

// Where the bracket at `begin` ends.
size_t end_of_brackets(const std::string& text, size_t begin) {
  int depth = 0;
  for (size_t i = begin; i < text.size(); ++i) {
    const char c = text[i];
    const bool is_arrow = c == '>' && i > 0 && text[i - 1] == '-';
    if (c == '(' || c == '<' || c == '{' || c == '[') ++depth;
    if ((c == ')' || c == '>' || c == '}' || c == ']') && !is_arrow && --depth == 0) return i + 1;
  }
  return text.size();
}

constexpr std::string_view kOperator = "operator", kAnonymous = "(anonymous namespace)";

// The end of the sign of an operator at `begin`: "()", "<<", " bool".
size_t end_of_operator(const std::string& text, size_t begin) {
  if (text.compare(begin, 1, " ") == 0) return std::min(text.find('(', begin), text.size());
  for (const std::string_view sign :
       {"<=>", "<<=", ">>=", "->*", "()", "[]", "->", "<<", ">>", "<=", ">=", "==", "!=",
        "&&",  "||",  "++",  "--",  "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<",
        ">",   "=",   "!",   "+",   "-",  "*",  "/",  "%",  "&",  "|",  "^",  "~",  ","}) {
    if (text.compare(begin, sign.size(), sign) == 0) return begin + sign.size();
  }
  return begin;
}

}  // namespace

std::string short_name(const std::string& demangled) {
  std::string name;
  for (size_t i = 0; i < demangled.size();) {
    const auto begins = [&](std::string_view what) {
      return demangled.compare(i, what.size(), what) == 0;
    };
    const auto take = [&](size_t end) {
      name += demangled.substr(i, end - i);
      i = end;
    };
    if (begins(kAnonymous)) {
      take(i + kAnonymous.size());
    } else if (begins(kOperator) && (name.empty() || name.back() == ':')) {
      take(end_of_operator(demangled, i + kOperator.size()));
    } else if (begins("{lambda")) {
      name += "{lambda}";
      i = end_of_brackets(demangled, i);
    } else if (begins("{") || begins("[")) {
      take(end_of_brackets(demangled, i));
    } else if (begins("<") || begins(" <")) {
      i = end_of_brackets(demangled, i);
    } else if (begins("decltype")) {
      i = end_of_brackets(demangled, std::min(demangled.find('(', i), demangled.size()));
    } else if (begins("(")) {  // parameters of the function around a lambda
      i = end_of_brackets(demangled, i);
      if (!begins("::")) break;
    } else if (begins(" ")) {
      name.clear();  // that was the result type
      ++i;
    } else {
      take(i + 1);
    }
  }
  return name.empty() ? demangled : name;
}

std::vector<std::string> without_plumbing(const std::vector<std::string>& names) {
  const auto is_standard = [](const std::string& name) { return name.compare(0, 5, "std::") == 0; };
  const auto has_name = [](const std::string& name) {
    return name.find("0x") == std::string::npos;
  };
  auto end = std::find(names.begin(), names.end(), "main");
  if (end != names.end()) ++end;
  while (end != names.begin() && !has_name(*(end - 1))) --end;
  std::vector<std::string> told;
  for (auto name = names.begin(); name != end; ++name) {
    const bool follows = name != names.begin() && is_standard(*(name - 1));
    if (!follows || !is_standard(*name)) told.push_back(*name);
  }
  return told;
}

std::vector<std::string> function_names(pid_t process, const std::vector<uint64_t>& addresses) {
  const std::vector<Mapping> mappings = mappings_of(process);
  std::map<std::string, SymbolFile> files;
  std::vector<std::string> names;
  for (size_t i = 0; i < addresses.size(); ++i) {
    const uint64_t address = addresses[i] - (i == 0 ? 0 : 1);
    const auto mapping = std::find_if(mappings.begin(), mappings.end(), [&](const Mapping& one) {
      return address >= one.begin && address < one.end;
    });
    if (addresses[i] == 0) {
      names.emplace_back("...");
      continue;
    }
    if (mapping == mappings.end() || mapping->path.empty()) {
      names.push_back(with_address("", address));
      continue;
    }
    const uint64_t offset = address - mapping->begin + mapping->offset;
    SymbolFile& file = files.try_emplace(mapping->path, mapping->path).first->second;
    const auto in_file = file.address_of(offset);
    const std::string name = in_file ? file.function_at(*in_file) : "";
    names.push_back(printable(name.empty() ? with_address(mapping->file(), in_file.value_or(offset))
                                           : short_name(demangled(name))));
  }
  return names;
}

}  // namespace smp::core
