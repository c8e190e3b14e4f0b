// Checkpoints as directories: committed whole or not at all, damage noticed, rotation.

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint_files.h"

#include <zero/checkpoint/data_files.h>
#include <zero/checkpoint/directory.h>

using namespace zero::checkpoint;
using namespace zero::test;
namespace fs = std::filesystem;

// The largest block that was asked for since this was last zeroed.
static std::atomic<size_t> largest_block = 0;

#ifndef __SANITIZE_ADDRESS__ // which has its own
[[gnu::noinline]] void* operator new(size_t bytes) {
  largest_block = std::max(largest_block.load(), bytes);
  if (void* block = std::malloc(bytes)) {
    return block;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* block) noexcept {
  std::free(block);
}
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept {
  std::free(block);
}
#endif

namespace {

constexpr int64_t kNumel = 3000;

std::vector<float> values(int64_t step, int64_t begin, int64_t count) {
  std::vector<float> data(count);
  for (int64_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>(step * 1'000 + (begin + i) % 997);
  }
  return data;
}

// As two ranks: 'w' of three pieces, and 'b'; one file of optimizer state.
void save(const std::string& path, int64_t step, const std::string& generation = new_generation()) {
  SaveDirectory directory(path, generation);
  Manifest manifest{
      .library = "zero 0.1.0", .torch = "2.13.0", .world_size = 2, .generation = generation};
  manifest.extra = "{\"step\": " + std::to_string(step) + "}";
  manifest.tensors = {
      {.name = "w", .shape = {kNumel}},
      {.name = "b", .dtype = c10::ScalarType::Long, .kind = TensorKind::buffer},
      {.name = "exp_avg/w", .shape = {10}, .kind = TensorKind::state}};
  struct Part {
    int64_t tensor, file, begin, count;
  };
  const std::vector<Part> parts = {
      {1, 0, 0, 1}, {0, 0, 0, 1000}, {0, 0, 1000, 1}, {0, 1, 1001, 1999}, {2, 2, 0, 10}};
  for (int64_t file = 0; file < 3; ++file) {
    const auto kind = file == 2 ? FileKind::optimizer : FileKind::parameters;
    const std::string data_path = directory.file_path(kind, file % 2, 0);
    std::vector<TensorEntry> entries;
    for (const Part& part : parts) {
      const ManifestTensor& tensor = manifest.tensors[part.tensor];
      if (part.file == file) {
        entries.push_back(
            {piece_key(tensor.name, part.begin, part.count), tensor.dtype, {part.count}});
      }
    }
    SafetensorsWriter writer(data_path, entries);
    for (const Part& part : parts) {
      if (part.file == file) {
        if (part.tensor == 1) {
          writer.write(&step, 8);
        } else {
          const auto data = values(step, part.begin, part.count);
          writer.write(data.data(), part.count * 4);
        }
        manifest.tensors[part.tensor].pieces.push_back(
            {file, part.begin, part.count, writer.checksums().back()});
      }
    }
    writer.finish();
    manifest.files.push_back({fs::path(data_path).filename().string(), writer.bytes()});
  }
  directory.commit(to_json(manifest));
}

int64_t step_of(const Manifest& manifest) {
  return std::stoll(manifest.extra.substr(9));
}

// Throws where something can't be read.
bool holds(const std::string& path, const Manifest& manifest, int64_t step) {
  DataFiles files(path, manifest);
  std::vector<float> w(kNumel);
  std::vector<float> middle(1500);
  std::vector<float> state(10);
  int64_t b = 0;
  files.read(*manifest.find("w"), {0, kNumel}, {}, w.data());
  files.read(*manifest.find("w"), {500, 2000}, {}, middle.data());
  files.read(*manifest.find("exp_avg/w"), {0, 10}, {0}, state.data());
  files.read(*manifest.find("b"), {0, 1}, {}, &b);
  return w == values(step, 0, kNumel) && middle == values(step, 500, 1500) &&
      state == values(step, 0, 10) && b == step;
}

void require_checkpoint(const std::string& path, int64_t step) {
  const Manifest manifest = read_manifest(path);
  REQUIRE(step_of(manifest) == step);
  REQUIRE(verify(path, manifest).empty());
  REQUIRE(holds(path, manifest, step));
}

std::vector<std::string> names_of(const std::string& path) {
  return names_in(open_directory(path));
}

} // namespace

TEST_CASE("a save replaces the one before, and leaves other files alone") {
  const TemporaryDirectory folder;
  const std::string path = folder / "run/a/step-1";
  save(path + "/", 1, "00000001");
  require_checkpoint(path, 1);
  REQUIRE(
      names_of(path) ==
      std::vector<std::string>{
          "manifest.json",
          "optimizer-00000001-0-0.safetensors",
          "parameters-00000001-0-0.safetensors",
          "parameters-00000001-1-0.safetensors"});
  write_file(path + "/notes.txt", "mine");
  write_file(path + "/manifest.json.tmp", "stray");
  write_file(path + "/optimizer-0000000f-9-9.safetensors", "stray");
  save(path, 2, "00000002");
  require_checkpoint(path, 2);
  REQUIRE(
      names_of(path) ==
      std::vector<std::string>{
          "manifest.json",
          "notes.txt",
          "optimizer-00000002-0-0.safetensors",
          "parameters-00000002-0-0.safetensors",
          "parameters-00000002-1-0.safetensors"});
}

TEST_CASE("a save that does not commit leaves the checkpoint before, and nothing else") {
  const TemporaryDirectory folder;
  const std::string path = folder / "step-1";
  save(path, 1);
  const auto before = names_of(path);
  const std::string manifest = read_file(path + "/manifest.json");
  {
    SaveDirectory directory(path, "0000000a");
    SafetensorsWriter(directory.file_path(FileKind::parameters, 0, 0), {}).finish();
    write_file(directory.file_path(FileKind::optimizer, 1, 3), "of another rank");
    require_error("expected generation 0000000a", [&] { directory.commit(manifest); });
    require_error("not well-formed", [&] { directory.commit("{"); });
    Manifest missing{
        .generation = "0000000a", .files = {{"parameters-0000000a-5-0.safetensors", 1}}};
    require_error("parameters-0000000a-5-0.safetensors' is not there", [&] {
      directory.commit(to_json(missing));
    });
    missing.files = {{"parameters-0000000a-0-0.safetensors", 1}};
    require_error(
        "expected 1 bytes before the commit, got 16", [&] { directory.commit(to_json(missing)); });
  }
  REQUIRE(names_of(path) == before);
  require_checkpoint(path, 1);
  // A released rank's files stay.
  std::string kept;
  {
    SaveDirectory directory(path, "0000000b");
    kept = directory.file_path(FileKind::parameters, 1, 0);
    write_file(kept, "x");
    directory.release();
  }
  REQUIRE(fs::exists(kept));
  // One that was made for it goes, unless something is in it.
  SaveDirectory(folder / "new/er", "0000000c");
  REQUIRE(fs::is_empty(folder / "new"));
}

TEST_CASE("a directory that is not a checkpoint is not saved to") {
  const TemporaryDirectory folder;
  write_file(folder / "file", "x");
  require_error("got a file: '" + (folder / "file"), [&] { save(folder / "file", 1); });
  require_error<c10::Error>("Not a directory", [&] { save(folder / "file/below", 1); });
  require_error("expected a directory to save to, got ''", [&] { save("", 1); });
  require_error("holds 'file'; save to a subdirectory", [&] { save(folder.path(), 1); });
  for (int i = 0; i < 7; ++i) {
    write_file(folder / "g" + std::to_string(i), "x");
  }
  require_error("'g0', 'g1', 'g2', 'g3' and 3 more", [&] { save(folder.path(), 1); });
  fs::create_directory(folder / "web");
  write_file(folder / "web/manifest.json", "{\"name\": \"app\"}");
  require_error("is not zero's", [&] { save(folder / "web", 1); });
  REQUIRE(read_file(folder / "web/manifest.json") == "{\"name\": \"app\"}");
  require_error("8 lower-case hex digits", [&] { save(folder / "new", 1, "../../xx"); });
  // What an interrupted first save left is no obstacle.
  fs::create_directory(folder / "half");
  write_file(folder / "half/parameters-00000000-0-0.safetensors", "x");
  require_error("no manifest.json", [&] { read_manifest(folder / "half"); });
  save(folder / "half", 3);
  require_checkpoint(folder / "half", 3);
  REQUIRE(names_of(folder / "half").size() == 4);
  require_error("no directory", [&] { read_manifest(folder / "none"); });
  fs::resize_file(folder / "half/manifest.json", int64_t{1} << 33); // takes no space
  require_error("has 8589934592 bytes, expected at most", [&] { read_manifest(folder / "half"); });
}

TEST_CASE("nothing outside the directory is read or deleted") {
  const TemporaryDirectory folder;
  const std::string path = folder / "step-1";
  save(path, 1, "00000001");
  const std::string data = path + "/parameters-00000001-0-0.safetensors";
  fs::rename(data, folder / "outside");
  fs::create_symlink(folder / "outside", data);
  const Manifest manifest = read_manifest(path);
  require_error("is a symbolic link", [&] { holds(path, manifest, 1); });
  auto problems = verify(path, manifest);
  REQUIRE(problems.size() == 1);
  REQUIRE(problems[0].file == "parameters-00000001-0-0.safetensors");
  fs::remove(data);
  REQUIRE(mkfifo(data.c_str(), 0600) == 0);
  require_error("regular file", [&] { holds(path, manifest, 1); });
  fs::remove(data);
  problems = verify(path, manifest);
  REQUIRE(problems.size() == 1);
  REQUIRE(problems[0].text.find("No such file") != std::string::npos);
  // A stray link with the name of a data file is deleted, not what it points to.
  fs::create_symlink(folder / "outside", path + "/parameters-00000009-0-0.safetensors");
  save(path, 2, "00000002");
  require_checkpoint(path, 2);
  REQUIRE(names_of(path).size() == 4);
  REQUIRE(fs::exists(folder / "outside"));
  fs::rename(path + "/manifest.json", folder / "manifest");
  fs::create_symlink(folder / "manifest", path + "/manifest.json");
  require_error("is a symbolic link", [&] { read_manifest(path); });
  require_error("is a symbolic link", [&] { save(path, 3); });
}

TEST_CASE("damaged data is noticed before it is used, and costs no memory") {
  const TemporaryDirectory folder;
  const std::string path = folder / "step-1";
  save(path, 1, "00000001");
  const Manifest manifest = read_manifest(path);
  const std::string victim = path + "/parameters-00000001-0-0.safetensors";
  const std::string bytes = read_file(victim);
  std::mt19937 random(9);
  largest_block = 0;
  int harmless = 0;
  for (int round = 0; round < 1000; ++round) {
    // Every other one in the header, every other two of the right length.
    std::string damaged = bytes;
    while (damaged == bytes) {
      damaged = corrupted(random, bytes, round % 2 == 0 ? 250 : 0);
      damaged.resize(round % 4 < 2 ? bytes.size() : damaged.size(), 'x');
    }
    {
      File file(::open(victim.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC), victim);
      write_all(file, damaged.data(), static_cast<int64_t>(damaged.size()), -1);
    }
    const auto problems = verify(path, manifest);
    for (const Problem& problem : problems) {
      REQUIRE(problem.file == "parameters-00000001-0-0.safetensors");
      REQUIRE(problem.text.find(victim) != std::string::npos);
    }
    if (problems.empty()) {
      REQUIRE(holds(path, manifest, 1));
      ++harmless;
    }
  }
  REQUIRE(harmless < 50); // spaces of the header, an order of fields
  REQUIRE(largest_block < 200'000);
}

TEST_CASE("a save that is killed leaves the old checkpoint or the new one") {
  const TemporaryDirectory folder;
  const std::string path = folder / "step-1";
  std::mt19937 random(10);
  save(path, 1);
  int64_t committed = 1;
  int interrupted = 0;
  size_t window = 20'000; // microseconds; about twice what a save takes here
  for (int round = 0; round < 50; ++round) {
    const int64_t before = committed;
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      try {
        for (int64_t step = committed + 1;; ++step) {
          save(path, step);
          if (write(pipe[1], &step, 8) != 8) {
            _exit(2);
          }
        }
      } catch (...) {
        _exit(3);
      }
    }
    close(pipe[1]);
    usleep(below(random, window));
    REQUIRE(kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    for (int64_t step = 0; read(pipe[0], &step, 8) == 8;) {
      committed = step;
    }
    close(pipe[0]);
    interrupted += names_of(path).size() > 4;
    const int64_t found = step_of(read_manifest(path));
    REQUIRE((found == committed || found == committed + 1));
    require_checkpoint(path, found);
    window = found > before ? window * 3 / 4 + 1 : std::min<size_t>(window * 2, 500'000);
    committed = found;
  }
  REQUIRE(committed > 1);
  REQUIRE(interrupted > 0);
}

TEST_CASE("the newest checkpoint is found by number, else by time") {
  const TemporaryDirectory folder;
  REQUIRE(latest(folder.path()) == std::nullopt);
  for (const int step : {10, 9, 100}) {
    save(folder / "step-" + std::to_string(step), step);
  }
  save(folder / "step-9", 9); // the last one written
  fs::create_directory(folder / "step-1000"); // none in it
  fs::create_directory(folder / "step-2000");
  write_file(folder / "step-2000/manifest.json", "{");
  save(folder / "step-3000", 1, "00000001");
  fs::resize_file(folder / "step-3000/parameters-00000001-1-0.safetensors", 10);
  fs::create_symlink(folder / "step-10", folder / "step-4000");
  write_file(folder / "step-5000", "x");
  REQUIRE(latest(folder.path()) == folder / "step-100");
  const auto found = list_checkpoints(folder.path());
  REQUIRE(found.size() == 3);
  REQUIRE((found[0].path == folder / "step-9" && found[1].path == folder / "step-10"));
  REQUIRE((found[0].prefix == "step-" && found[0].number == 9));
  // Without optimizer state it is one still.
  for (const std::string& name : names_of(folder / "step-100")) {
    if (name.rfind("optimizer-", 0) == 0) {
      fs::remove(folder / "step-100/" + name);
    }
  }
  REQUIRE(latest(folder.path()) == folder / "step-100");
  save(folder / "final", 7);
  REQUIRE(latest(folder.path()) == folder / "final");
  require_error("no directory", [&] { latest(folder / "none"); });
}

TEST_CASE("rotation keeps the last ones of its kind") {
  const TemporaryDirectory folder;
  for (const int step : {1, 2, 10, 11}) {
    save(folder / "step-" + std::to_string(step), step);
    save(folder / "best-" + std::to_string(step), step);
  }
  save(folder / "final", 1);
  write_file(folder / "step-2/notes.txt", "mine");
  fs::create_directory(folder / "step-0");
  REQUIRE(
      rotate(folder / "step-11/", 2) ==
      std::vector<std::string>{folder / "step-1", folder / "step-2"});
  REQUIRE_FALSE(fs::exists(folder / "step-1"));
  REQUIRE(names_of(folder / "step-2") == std::vector<std::string>{"notes.txt"});
  REQUIRE(rotate(folder / "step-11", 2).empty());
  REQUIRE(rotate(folder / "final", 1).empty());
  require_checkpoint(folder / "step-10", 10);
  REQUIRE(list_checkpoints(folder.path()).size() == 7);
  // What was just saved is kept, whatever its number.
  REQUIRE(rotate(folder / "step-10", 1) == std::vector<std::string>{folder / "step-11"});
  REQUIRE(fs::exists(folder / "step-0"));
  require_error("keep_last: expected 1 or more, got 0", [&] { rotate(folder / "step-10", 0); });
}
