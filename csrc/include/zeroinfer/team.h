/*
 * A team of sleeping threads that share out the chunks of one kernel.
 *
 * Lifetime: the shared team lives as long as the process; a forked child gets
 * its own on first use. `context` must stay valid until zi_team_run returns.
 * Threads: zi_team_run blocks until every chunk is done and may be called from
 * any thread; calls take turns.
 */
#ifndef ZEROINFER_TEAM_H
#define ZEROINFER_TEAM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zi_team zi_team;

/* Work on the chunks [start, stop); must not fail. */
typedef void (*zi_task_fn)(void *context, int64_t start, int64_t stop);

/*
 * The team of this process, working with `num_threads` threads from now on,
 * the caller of zi_team_run included. NULL if num_threads < 1. Threads that the
 * system refuses are done without.
 */
zi_team *zi_team_shared(int num_threads);

/*
 * Run fn over the chunks [0, num_chunks), claimed one at a time by whichever
 * thread is free. Returns 0, or -EINVAL.
 */
int zi_team_run(zi_team *team, int64_t num_chunks, zi_task_fn fn, void *context);

#ifdef __cplusplus
}
#endif

#endif
