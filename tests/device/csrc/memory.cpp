#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "environment.h"
#include "lanes.h"

namespace zsim {

namespace {

constexpr size_t kArenaBytes = size_t{1} << 36;  // of addresses

struct Owner {
  size_t bytes;
  const char* name;
};

struct Arena {
  char* seen = nullptr;    // PROT_NONE
  char* kernel = nullptr;  // the same pages
  size_t used = 0;
  size_t limit = 0;
  std::map<const char*, Owner> owners;

  Arena() : limit(number_from("ZSIM_MEMORY", uint64_t{2} << 30)) {
    const int file = memfd_create("zsim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kArenaBytes)) throw std::runtime_error("zsim: memfd_create");
    seen = map(file, PROT_NONE);
    kernel = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int protection) {
    void* at = mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) throw std::runtime_error("zsim: mmap");
    return static_cast<char*>(at);
  }

  bool holds(const void* address) const {
    return address >= seen && address < seen + kArenaBytes;
  }
};

struct Memory {
  std::mutex mutex;
  std::vector<Arena> arenas{static_cast<size_t>(device_count())};
  std::map<uintptr_t, size_t> registered;
};

Memory& memory();

struct sigaction handler_before;

const char* access_of([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  const auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  return registers[REG_ERR] & 2 ? "wrote" : "read";
#else
  return "read or wrote";
#endif
}

// Says whose memory it was, then lets the same access end the process as it would have done.
void name_fault(int, siginfo_t* info, void* context) {
  if (info->si_code <= 0) return;  // sent by faulthandler's raise(): the access itself comes again
  const int device = device_of(info->si_addr);
  if (device >= 0) {
    const std::unique_lock<std::mutex> lock(memory().mutex, std::try_to_lock);
    const auto& owners = memory().arenas[device].owners;
    auto owner = owners.upper_bound(static_cast<const char*>(info->si_addr));
    const bool is_known = lock.owns_lock() && owner != owners.begin();
    if (is_known) --owner;
    char line[512];
    const int length = std::snprintf(
        line, sizeof line,
        "zsim: the host %s device memory at %p (zsim:%d), %zu bytes allocated by %s: call .cpu()\n",
        access_of(context), info->si_addr, device, is_known ? owner->second.bytes : 0,
        is_known ? owner->second.name : "an unknown operator");
    if (write(STDERR_FILENO, line, std::min<size_t>(length, sizeof line)) < 0) _exit(139);
  }
  sigaction(SIGSEGV, &handler_before, nullptr);
}

Memory& memory() {
  static auto* made = [] {
    auto* out = new Memory;
    struct sigaction action {};
    action.sa_sigaction = name_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &handler_before);
    return out;
  }();
  return *made;
}

using Lock = std::lock_guard<std::mutex>;

}  // namespace

char* reserve(int device, size_t bytes) {
  const Lock lock(memory().mutex);
  Arena& arena = memory().arenas.at(device);
  if (arena.used + bytes > kArenaBytes) throw std::runtime_error("zsim: no addresses are left");
  char* out = arena.seen + arena.used;
  arena.used += bytes;
  return out;
}

void set_owner(const void* address, size_t bytes, const char* name) {
  const Lock lock(memory().mutex);
  memory().arenas.at(device_of(address)).owners[static_cast<const char*>(address)] = {bytes, name};
}

int device_of(const void* address) {
  const auto& arenas = memory().arenas;
  for (size_t device = 0; device < arenas.size(); ++device)
    if (arenas[device].holds(address)) return static_cast<int>(device);
  return -1;
}

char* kernel_view(const void* address) {
  const int device = device_of(address);
  if (device < 0) return nullptr;
  const Arena& arena = memory().arenas[device];
  return arena.kernel + (static_cast<const char*>(address) - arena.seen);
}

size_t memory_limit(int device) {
  const Lock lock(memory().mutex);
  return memory().arenas.at(device).limit;
}

void set_memory_limit(size_t bytes, int device) {
  const Lock lock(memory().mutex);
  memory().arenas.at(device).limit = bytes;
}

void register_host(uintptr_t address, size_t bytes) {
  const Lock lock(memory().mutex);
  if (!memory().registered.emplace(address, bytes).second)
    throw std::runtime_error("zsim: this host memory is registered already");
}

void unregister_host(uintptr_t address) {
  const Lock lock(memory().mutex);
  if (!memory().registered.erase(address))
    throw std::runtime_error("zsim: this host memory is not registered");
}

bool is_registered(const void* address) {
  const Lock lock(memory().mutex);
  const auto where = reinterpret_cast<uintptr_t>(address);
  auto range = memory().registered.upper_bound(where);
  if (range == memory().registered.begin()) return false;
  --range;
  return where < range->first + range->second;
}

}  // namespace zsim
