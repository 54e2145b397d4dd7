// Finds the features that the processor has and the system allows.
#include "features.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

#ifdef SIE_TILES_IN_SOFTWARE  // a test replaces the instructions for tiles by functions
int32_t amx_features() { return kAmxBf16 | kAmxInt8; }
#else
constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr unsigned long kTileData = 18;

// Source: Intel SDM volume 1, 13.2 (XCR0) and Linux Documentation/arch/x86/xstate.rst (permission for tile data).
int32_t amx_features() {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 24))) return 0;
    const unsigned leaf7_d = d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;  // OSXSAVE; XGETBV needs it
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3 || syscall(SYS_arch_prctl, kRequestPermission, kTileData)) return 0;
    return (leaf7_d & (1u << 22) ? kAmxBf16 : 0) | (leaf7_d & (1u << 25) ? kAmxInt8 : 0);
}
#endif

// Not every compiler that we build with knows the name for __builtin_cpu_supports.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & (1u << 29);
}

int32_t detect() {
    __builtin_cpu_init();
    int32_t found = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) found |= kAvx2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return found;
    found |= kAvx512;
    const bool has_vnni = __builtin_cpu_supports("avx512vnni");
    if (has_vnni) found |= kAvx512Vnni;
    if (has_vnni && __builtin_cpu_supports("avx512bf16")) found |= kAvx512Bf16;
    return found | amx_features();
}

}  // namespace
#else
namespace {
int32_t detect() { return 0; }
}  // namespace
#endif

namespace {
int32_t limit = -1;
}

SIE_EXPORT const char* sie_native_digest() { return SIE_NATIVE_DIGEST; }

SIE_EXPORT int32_t sie_native_features() {
    static const int32_t found = detect();
    return found & limit;
}

// Lets kernels use these features only, so that a test can run the kernels of an older processor. Returns the last limit.
SIE_EXPORT int32_t sie_native_limit(int32_t features) {
    const int32_t before = limit;
    limit = features;
    return before;
}
