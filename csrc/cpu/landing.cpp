#include "chunks.h"
#include "elements.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

namespace {

void convert_one(const zi::half *source, zi::bf16 *target) {
    zi::store_one(target, zi::load_one(source));
}

#if defined(__x86_64__)

/* Elements of one work item, so that a chunk is counted in items of some size. */
constexpr int64_t kItem = 1024;

ZI_AVX2 void convert(const zi::half *source, zi::bf16 *target, int64_t start, int64_t stop) {
    int64_t idx = start;
    for (; idx + 2 * zi::kLanes <= stop; idx += 2 * zi::kLanes) {
        const __m256 first = zi::load8(source + idx);
        const __m256 second = zi::load8(source + idx + zi::kLanes);
        zi::store8(target + idx, first);
        zi::store8(target + idx + zi::kLanes, second);
    }
    for (; idx < stop; ++idx) {
        convert_one(source + idx, target + idx);
    }
}

#endif

int check(const void *source, const void *target, int64_t num_elements) {
    const bool is_there = (source != nullptr && target != nullptr) || num_elements == 0;
    return num_elements >= 0 && is_there ? 0 : -EINVAL;
}

}  // namespace

int zi_half_to_bf16_reference(const void *source, void *target, int64_t num_elements) {
    const int error = check(source, target, num_elements);
    for (int64_t idx = 0; error == 0 && idx < num_elements; ++idx) {
        convert_one(static_cast<const zi::half *>(source) + idx,
                    static_cast<zi::bf16 *>(target) + idx);
    }
    return error;
}

int zi_half_to_bf16(const void *source, void *target, int64_t num_elements, zi_team *team) {
    const int error = check(source, target, num_elements);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        const auto *halves = static_cast<const zi::half *>(source);
        auto *converted = static_cast<zi::bf16 *>(target);
        const int64_t num_items = (num_elements + kItem - 1) / kItem;
        const auto body = [&](int64_t start, int64_t stop) {
            convert(halves, converted, start * kItem, std::min(stop * kItem, num_elements));
        };
        return zi::for_items(team, num_items, 2 * kItem * int64_t(sizeof(zi::half)), body);
    }
#endif
    (void)team;
    return zi_half_to_bf16_reference(source, target, num_elements);
}
