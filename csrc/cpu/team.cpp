#include "zeroinfer/team.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

/*
 * Workers sleep on a condition variable between kernels: a spinning thread would slow everything
 * else on a small machine. A worker that wakes late finds the job closed and goes back to sleep, so
 * that a thread without a processor never holds the others up; for the same reason chunks are
 * claimed rather than dealt out.
 */
struct zi_team {
    std::mutex run_lock;
    std::mutex lock;
    std::condition_variable has_job;
    std::condition_variable is_idle;
    int num_threads = 1;
    int num_workers = 0;
    int num_joined = 0;
    bool is_open = false;
    uint64_t job = 0;
    zi_task_fn fn = nullptr;
    void *context = nullptr;
    int64_t num_chunks = 0;
    std::atomic<int64_t> next_chunk{0};

    void claim_chunks() {
        for (;;) {
            const int64_t chunk = next_chunk.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= num_chunks) {
                return;
            }
            fn(context, chunk, chunk + 1);
        }
    }

    void work() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            has_job.wait(hold, [&] { return is_open && job != seen; });
            seen = job;
            if (num_joined + 1 >= num_threads) {
                continue;
            }
            ++num_joined;
            hold.unlock();
            claim_chunks();
            hold.lock();
            if (--num_joined == 0) {
                is_idle.notify_one();
            }
        }
    }

    /* Signals are for the threads of the program: none may land on a worker. */
    void grow(int wanted) {
        sigset_t all_signals;
        sigset_t previous;
        sigfillset(&all_signals);
        pthread_sigmask(SIG_SETMASK, &all_signals, &previous);
        std::lock_guard<std::mutex> hold(lock);
        num_threads = wanted;
        while (num_workers + 1 < wanted && start_worker()) {
            ++num_workers;
        }
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }

    bool start_worker() {
        pthread_t worker;
        const auto start = [](void *team) -> void * {
            static_cast<zi_team *>(team)->work();
            return nullptr;
        };
        if (pthread_create(&worker, nullptr, start, this) != 0) {
            return false;
        }
        pthread_detach(worker);
        return true;
    }

    void open(zi_task_fn job_fn, void *job_context, int64_t count) {
        std::lock_guard<std::mutex> hold(lock);
        fn = job_fn;
        context = job_context;
        num_chunks = count;
        next_chunk.store(0, std::memory_order_relaxed);
        is_open = true;
        ++job;
    }

    void close() {
        std::unique_lock<std::mutex> hold(lock);
        is_open = false;
        is_idle.wait(hold, [&] { return num_joined == 0; });
    }
};

namespace {

std::mutex shared_lock;
zi_team *shared_team = nullptr;

/* The child has none of the threads and cannot know what they held: it starts anew. */
void forget_team_in_child() {
    new (&shared_lock) std::mutex;
    shared_team = nullptr;
}

}  // namespace

zi_team *zi_team_shared(int num_threads) {
    if (num_threads < 1) {
        return nullptr;
    }
    static const int registered = pthread_atfork(nullptr, nullptr, forget_team_in_child);
    std::lock_guard<std::mutex> hold(shared_lock);
    if (shared_team == nullptr && registered == 0) {
        shared_team = new (std::nothrow) zi_team;
    }
    if (shared_team != nullptr) {
        std::lock_guard<std::mutex> turn(shared_team->run_lock);
        shared_team->grow(num_threads);
    }
    return shared_team;
}

int zi_team_run(zi_team *team, int64_t num_chunks, zi_task_fn fn, void *context) {
    if (team == nullptr || fn == nullptr || num_chunks < 0) {
        return -EINVAL;
    }
    std::lock_guard<std::mutex> turn(team->run_lock);
    if (num_chunks < 2 || team->num_threads < 2) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            fn(context, chunk, chunk + 1);
        }
        return 0;
    }
    team->open(fn, context, num_chunks);
    team->has_job.notify_all();
    team->claim_chunks();
    team->close();
    return 0;
}
