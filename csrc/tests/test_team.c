/* Every chunk runs exactly once, with any number of threads, also in a forked child. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "zeroinfer/team.h"

enum { NUM_CHUNKS = 1000 };

static atomic_int counts[NUM_CHUNKS];

static void count(void *context, int64_t start, int64_t stop)
{
	for (int64_t chunk = start; chunk < stop; chunk++)
		atomic_fetch_add((atomic_int *)context + chunk, 1);
}

static int runs_each_once(int num_threads, int64_t num_chunks)
{
	for (int idx = 0; idx < NUM_CHUNKS; idx++)
		atomic_store(&counts[idx], 0);
	if (zi_team_run(zi_team_shared(num_threads), num_chunks, count, counts))
		return 0;
	for (int idx = 0; idx < NUM_CHUNKS; idx++)
		if (atomic_load(&counts[idx]) != (idx < num_chunks))
			return 0;
	return 1;
}

static int child_works(void)
{
	int status = 0;
	pid_t child = fork();

	if (child == 0)
		_exit(runs_each_once(3, NUM_CHUNKS) ? 0 : 1);
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(void)
{
	int failed = 0;

	for (int threads = 1; threads < 6; threads++)
		for (int repeat = 0; repeat < 200; repeat++)
			failed |= !runs_each_once(threads, (repeat * 7) % (NUM_CHUNKS + 1));
	failed |= !runs_each_once(1, NUM_CHUNKS);
	failed |= !child_works();
	failed |= zi_team_run(NULL, 1, count, counts) == 0;
	if (failed)
		fprintf(stderr, "a chunk was left out or ran twice\n");
	return failed;
}
