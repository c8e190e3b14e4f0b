#include <zero/autograd/backward_end.h>

#include <memory>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

namespace zero::autograd {
namespace {

namespace ta = torch::autograd;

// Travels from the innermost graph task outwards.
struct Watch {
  Watch(std::function<void()> end, std::function<void()> loss)
      : on_end(std::move(end)), on_loss(std::move(loss)) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    if (!ended) {
      on_loss();
    }
  }
  std::function<void()> on_end;
  std::function<void()> on_loss;
  bool ended = false;
  int64_t level = 0; // graph tasks left so far
};

void watch_current_task(const std::shared_ptr<Watch>& watch);

// Runs when the enclosing backward goes on after the node that nested another.
class ResumeHook final : public ta::FunctionPreHook {
 public:
  explicit ResumeHook(std::shared_ptr<Watch> watch)
      : watch_(std::move(watch)), level_(watch_->level) {}
  ta::variable_list operator()(const ta::variable_list& grads) override {
    if (watch_ && !watch_->ended && watch_->level == level_) {
      ++watch_->level;
      watch_current_task(watch_);
    }
    watch_.reset();
    return grads;
  }

 private:
  std::shared_ptr<Watch> watch_;
  int64_t level_;
};

void task_ended(const std::shared_ptr<Watch>& watch) {
  // Inside another backward, the node that nested this one is being evaluated;
  // the first node after it belongs to the enclosing graph task.
  const auto enclosing = ta::get_current_node();
  bool resumes = false;
  if (enclosing) {
    for (const ta::Edge& edge : enclosing->next_edges()) {
      if (edge.is_valid()) {
        edge.function->add_pre_hook(std::make_unique<ResumeHook>(watch));
        resumes = true;
      }
    }
  }
  if (!resumes) {
    watch->ended = true;
    watch->on_end();
  }
}

void watch_current_task(const std::shared_ptr<Watch>& watch) {
  ta::Engine::get_default_engine().queue_callback([watch] { task_ended(watch); });
}

} // namespace

void at_end_of_backward(std::function<void()> on_end, std::function<void()> on_loss) {
  watch_current_task(std::make_shared<Watch>(std::move(on_end), std::move(on_loss)));
}

bool inside_backward() {
  return ta::get_current_graph_task_id() != -1;
}

} // namespace zero::autograd
