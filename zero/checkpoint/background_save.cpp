#include <zero/checkpoint/background_save.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <zero/checkpoint/prepared_save.h>
#include <zero/checkpoint/save.h>
#include <zero/comm/communicator.h>
#include <zero/comm/error_text.h>

namespace zero {

BackgroundSave::BackgroundSave(std::string directory, std::function<void()> work)
    : directory_(std::move(directory)) {
  std::packaged_task<void()> task(std::move(work));
  result_ = task.get_future().share();
  thread_ = std::thread(std::move(task));
}

BackgroundSave::~BackgroundSave() {
  thread_.join();
}

bool BackgroundSave::done() const {
  return result_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void BackgroundSave::wait() {
  result_.wait();
  seen_ = true;
  result_.get();
}

bool BackgroundSave::failed() const {
  try {
    result_.get();
    return false;
  } catch (...) {
    return true;
  }
}

bool BackgroundSave::has_unseen_error() const {
  return failed() && !seen_;
}

std::exception_ptr BackgroundSave::unseen_error() {
  try {
    result_.get();
  } catch (...) {
    return seen_.exchange(true) ? std::exception_ptr() : std::current_exception();
  }
  return {};
}

namespace checkpoint {
namespace {

// What ranks need between two saves of an engine: training goes on over its own
// communicator meanwhile, so they talk over another.
struct Background {
  std::weak_ptr<Engine> engine;
  std::shared_ptr<comm::Communicator> channel;
  std::shared_ptr<BackgroundSave> save;
};

class Backgrounds {
 public:
  // Never destroyed: at exit its threads are waited for, and not later.
  static Backgrounds& all() {
    static Backgrounds* const instance = [] {
      std::atexit(finish_background_saves);
      return new Backgrounds(); // NOLINT(cppcoreguidelines-owning-memory)
    }();
    return *instance;
  }

  // A copy; of nothing for an engine that is new.
  Background find(Engine* engine) {
    const std::lock_guard lock(mutex_);
    tidy();
    const auto found = by_engine_.find(engine);
    return found == by_engine_.end() ? Background() : found->second;
  }
  void set(Engine* engine, Background background) {
    const std::lock_guard lock(mutex_);
    tidy();
    by_engine_[engine] = std::move(background);
  }
  std::vector<std::shared_ptr<BackgroundSave>> saves() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<BackgroundSave>> saves = left_;
    for (const auto& [engine, background] : by_engine_) {
      if (background.save) {
        saves.push_back(background.save);
      }
    }
    return saves;
  }

 private:
  // Another engine may come to lie where one was that is gone.
  void tidy() {
    std::erase_if(by_engine_, [this](auto& item) {
      const bool gone = item.first != nullptr && item.second.engine.expired();
      if (gone && item.second.save) {
        left_.push_back(std::move(item.second.save));
      }
      return gone;
    });
    std::erase_if(
        left_, [](const auto& save) { return save->done() && !save->has_unseen_error(); });
  }

  std::mutex mutex_;
  std::map<Engine*, Background> by_engine_;
  std::vector<std::shared_ptr<BackgroundSave>> left_; // of engines that are gone
};

} // namespace

void settle_background_save(Engine* engine) {
  Background background = Backgrounds::all().find(engine);
  if (!background.save) {
    return;
  }
  const auto save = std::exchange(background.save, nullptr);
  const Together ranks(engine, "saving '" + save->directory() + "' in the background");
  bool failed = false;
  try {
    for (const std::string& of_rank : ranks.run([&] {
           if (const std::exception_ptr error = save->unseen_error()) {
             std::rethrow_exception(error);
           }
           return std::string(save->failed() ? "failed" : "");
         })) {
      failed = failed || !of_rank.empty();
    }
  } catch (...) {
    background.channel = nullptr; // may be in any state
    Backgrounds::all().set(engine, std::move(background));
    throw;
  }
  if (failed) {
    background.channel = nullptr;
  }
  Backgrounds::all().set(engine, std::move(background));
}

std::shared_ptr<BackgroundSave>
async_save(const std::string& path, const Contents& contents, const SaveOptions& options) {
  Engine* const engine = contents.engine.get();
  settle_background_save(engine);
  auto prepared = std::make_shared<PreparedSave>(path, contents, options);
  prepared->copy();
  Background background = Backgrounds::all().find(engine);
  background.engine = contents.engine;
  if (engine != nullptr && !background.channel) {
    background.channel = engine->duplicate_communicator();
  }
  const Together ranks(background.channel, "saving '" + path + "' in the background");
  background.save =
      std::make_shared<BackgroundSave>(path, [prepared = std::move(prepared), ranks]() mutable {
        const auto save = std::move(prepared); // its copies are freed as soon as it ends
        save->finish(ranks);
      });
  const auto save = background.save;
  Backgrounds::all().set(engine, std::move(background));
  return save;
}

void finish_background_saves() noexcept {
  for (const auto& save : Backgrounds::all().saves()) {
    if (const std::exception_ptr error = save->unseen_error()) {
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-vararg): streams may be gone at exit
      std::fprintf(stderr, "%s\n", comm::text_of(error).c_str());
    }
  }
}

} // namespace checkpoint
} // namespace zero
