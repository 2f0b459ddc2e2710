// SPDX-License-Identifier: Apache-2.0
#include "core/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <optional>

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

// The symbols of an ELF file. What is not as it should be has none.
class SymbolFile {
 public:
  explicit SymbolFile(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat file {};
    if (fd < 0) return;
    if (fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_size > 0) {
      bytes_ = static_cast<size_t>(file.st_size);
      void* const data = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
      if (data != MAP_FAILED) data_ = static_cast<const char*>(data);
    }
    close(fd);
    const auto* const header = at<ElfW(Ehdr)>(0);
    if (header == nullptr || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_ident[EI_CLASS] != (sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32)) {
      return;
    }
    segments_ = at<ElfW(Phdr)>(header->e_phoff, header->e_phnum);
    sections_ = at<ElfW(Shdr)>(header->e_shoff, header->e_shnum);
    segment_count_ = segments_ == nullptr ? 0 : header->e_phnum;
    section_count_ = sections_ == nullptr ? 0 : header->e_shnum;
  }
  ~SymbolFile() {
    if (data_ != nullptr) munmap(const_cast<char*>(data_), bytes_);
  }
  SymbolFile(const SymbolFile&) = delete;
  SymbolFile& operator=(const SymbolFile&) = delete;

  // Where the program has what lies there in the file, before it is moved as a whole.
  std::optional<uint64_t> address_of(uint64_t offset) const {
    for (size_t i = 0; i < segment_count_; ++i) {
      const auto& segment = segments_[i];
      if (segment.p_type == PT_LOAD && offset >= segment.p_offset &&
          offset < segment.p_offset + segment.p_filesz) {
        return offset - segment.p_offset + segment.p_vaddr;
      }
    }
    return std::nullopt;
  }

  // The mangled name of the function at an address; empty without one.
  std::string function_at(uint64_t address) const {
    for (size_t i = 0; i < section_count_; ++i) {
      const auto& table = sections_[i];
      if (table.sh_type != SHT_SYMTAB && table.sh_type != SHT_DYNSYM) continue;
      const size_t count = table.sh_size / sizeof(ElfW(Sym));
      const auto* const symbols = at<ElfW(Sym)>(table.sh_offset, count);
      if (symbols == nullptr || table.sh_link >= section_count_) continue;
      const auto* const found = std::find_if(symbols, symbols + count, [&](const auto& symbol) {
        const bool is_function = (symbol.st_info & 0xf) == STT_FUNC && symbol.st_shndx != SHN_UNDEF;
        return is_function && address >= symbol.st_value &&
               address < symbol.st_value + symbol.st_size;
      });
      if (found != symbols + count) return text(sections_[table.sh_link], found->st_name);
    }
    return "";
  }

 private:
  template <class T>
  const T* at(uint64_t offset, size_t count = 1) const {
    const bool fits =
        data_ != nullptr && offset <= bytes_ && count <= (bytes_ - offset) / sizeof(T);
    return fits ? reinterpret_cast<const T*>(data_ + offset) : nullptr;
  }

  std::string text(const ElfW(Shdr) & strings, uint64_t offset) const {
    const auto* const begin = at<char>(strings.sh_offset, strings.sh_size);
    if (begin == nullptr || offset >= strings.sh_size) return "";
    return {begin + offset, strnlen(begin + offset, strings.sh_size - offset)};
  }

  const char* data_ = nullptr;
  size_t bytes_ = 0;
  const ElfW(Phdr) * segments_ = nullptr;
  const ElfW(Shdr) * sections_ = nullptr;
  size_t segment_count_ = 0, section_count_ = 0;
};

// A C function's name may be one of a type to the demangler.
std::string demangled(const std::string& name) {
  if (name.compare(0, 2, "_Z") != 0) return name;
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
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

// Of what belongs to the word "operator" before `begin`: "()", "<<", " bool".
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
    } else if (begins("(")) {  // parameters, of what a lambda is in
      i = end_of_brackets(demangled, i);
      if (!begins("::")) break;
    } else if (begins(" ")) {
      name.clear();  // that was what it returns
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
    const SymbolFile& file = files.try_emplace(mapping->path, mapping->path).first->second;
    const auto in_file = file.address_of(offset);
    const std::string name = in_file ? file.function_at(*in_file) : "";
    names.push_back(name.empty() ? with_address(mapping->file(), in_file.value_or(offset))
                                 : short_name(demangled(name)));
  }
  return names;
}

}  // namespace smp::core
