// SPDX-License-Identifier: Apache-2.0
// What a disk holds after a power cut, at its worst: of each file what it was when it was last synced, under the names
// that its folder had when that was last synced, and nothing else. Loaded into a process before its libc.
//
// IFAB_TEST_WATCHED is the folder that is watched, IFAB_TEST_DURABLE where the copy of it is kept: for each folder a
// file `.entries` with its names, for each file its bytes. A copy appears before the call that asked for it returns.

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace {

namespace fs = std::filesystem;
using Sync = int (*)(int);

void replace(const fs::path& target, const std::string& content) {
  fs::create_directories(target.parent_path());
  const fs::path made = target.string() + "." + std::to_string(gettid());
  std::ofstream(made, std::ios::binary) << content;
  fs::rename(made, target);
}

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string names_in(const fs::path& folder) {
  std::string names;
  for (const auto& entry : fs::directory_iterator(folder)) names += entry.path().filename().string() + "\n";
  return names;
}

void keep(int fd) {
  const char* watched = std::getenv("IFAB_TEST_WATCHED");
  const char* durable = std::getenv("IFAB_TEST_DURABLE");
  if (watched == nullptr || durable == nullptr) return;
  const fs::path path = fs::read_symlink("/proc/self/fd/" + std::to_string(fd));
  const std::string within = path.lexically_relative(watched).string();
  if (within.empty() || within.starts_with("..")) return;
  const fs::path copy = fs::path(durable) / within;
  if (fs::is_directory(path)) {
    replace(copy / ".entries", names_in(path));
  } else {
    replace(copy, bytes_of(path));
  }
}

int sync_and_keep(const char* name, int fd) {
  const auto real = reinterpret_cast<Sync>(dlsym(RTLD_NEXT, name));
  const int status = real(fd);
  if (status == 0) keep(fd);
  return status;
}

}  // namespace

extern "C" int fsync(int fd) { return sync_and_keep("fsync", fd); }

extern "C" int fdatasync(int fd) { return sync_and_keep("fdatasync", fd); }
