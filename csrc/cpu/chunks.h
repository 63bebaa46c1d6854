/* Sharing out rows over a team, in chunks that stay in the second-level cache. */
#ifndef ZEROINFER_CPU_CHUNKS_H
#define ZEROINFER_CPU_CHUNKS_H

#include <algorithm>
#include <cstdint>

#include "zeroinfer/team.h"

namespace zi {

constexpr int64_t kChunkBytes = 128 * 1024;
/* Less than this is done before another thread is awake. */
constexpr int64_t kAloneBytes = 256 * 1024;

/* Call body(start, stop) until all items are done; which thread does which changes no result. */
template <typename Body>
int for_items(zi_team *team, int64_t num_items, int64_t item_bytes, const Body &body) {
    struct Job {
        const Body &body;
        int64_t num_items;
        int64_t grain;

        static void run(void *context, int64_t start, int64_t stop) {
            const Job &job = *static_cast<const Job *>(context);
            job.body(start * job.grain, std::min(stop * job.grain, job.num_items));
        }
    };
    const int64_t bytes = std::max<int64_t>(item_bytes, 1);
    if (team == nullptr || num_items <= kAloneBytes / bytes) {
        body(int64_t{0}, num_items);
        return 0;
    }
    Job job{body, num_items, std::max<int64_t>(kChunkBytes / bytes, 1)};
    return zi_team_run(team, (num_items + job.grain - 1) / job.grain, Job::run, &job);
}

}  // namespace zi

#endif
