//! What the machine grants this process: cores and memory, seen through affinity and cgroups (v1 and
//! v2). Reads the OS once per question; decides no policy.

/// Cores that this process may keep busy: its affinity mask, cut by the CPU quota of its cgroup and
/// of those above it. At least 1.
pub(crate) fn usable_cores() -> usize {
    let cores = affinity_cores().unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    cgroup_quota_cores().map_or(cores, |quota| cores.min(quota)).max(1)
}

/// Bytes that this process may still take: what the OS calls available, cut by its cgroup's limit.
/// 0 when unknown.
pub(crate) fn available_memory_bytes() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text)).unwrap_or(0);
    cgroup_memory_left().map_or(machine, |left| if machine == 0 { left } else { machine.min(left) })
}

#[cfg(target_os = "linux")]
fn affinity_cores() -> Option<usize> {
    // SAFETY: an all-zero cpu_set_t is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most the given size into `set`.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0;
    if failed {
        return None;
    }
    // SAFETY: reads the set filled above.
    usize::try_from(unsafe { libc::CPU_COUNT(&set) }).ok().filter(|&n| n > 0)
}

#[cfg(not(target_os = "linux"))]
fn affinity_cores() -> Option<usize> {
    None
}

/// `MemAvailable` of /proc/meminfo, in bytes.
fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The folders of this process's cgroup and of those above it, under the mount point of v2 and of
/// the v1 controller `controller`. Inside a container the path may be that of the host and not exist;
/// the mount's root is always among them.
fn cgroup_folders(controller: &str) -> Vec<std::path::PathBuf> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut folders = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let mount = if controllers.is_empty() {
            std::path::PathBuf::from("/sys/fs/cgroup")
        } else if controllers.split(',').any(|name| name == controller) {
            std::path::Path::new("/sys/fs/cgroup").join(controller)
        } else {
            continue;
        };
        let inner = std::path::Path::new(path.trim_start_matches('/'));
        folders.extend(inner.ancestors().map(|part| mount.join(part)));
    }
    folders
}

fn cgroup_quota_cores() -> Option<usize> {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).ok();
    cgroup_folders("cpu")
        .into_iter()
        .filter_map(|folder| {
            let v2 = read(folder.join("cpu.max")).and_then(|text| parse_cpu_max(&text));
            v2.or_else(|| {
                let quota = read(folder.join("cpu.cfs_quota_us"))?;
                let period = read(folder.join("cpu.cfs_period_us"))?;
                parse_cpu_max(&format!("{} {}", quota.trim(), period.trim()))
            })
        })
        .min()
}

/// `quota period` (v2's cpu.max; v1's two files joined) as whole cores, rounded up. `None` when
/// unlimited (`max`, or a quota of -1).
fn parse_cpu_max(text: &str) -> Option<usize> {
    let mut fields = text.split_whitespace();
    let quota: u64 = fields.next()?.parse().ok()?;
    let period: u64 = fields.next()?.parse().ok().filter(|&period| period > 0)?;
    usize::try_from(quota.div_ceil(period)).ok().filter(|&cores| cores > 0)
}

fn cgroup_memory_left() -> Option<u64> {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    cgroup_folders("memory")
        .into_iter()
        .filter_map(|folder| {
            let limit = read(folder.join("memory.max")).or_else(|| read(folder.join("memory.limit_in_bytes")))?;
            let used = read(folder.join("memory.current")).or_else(|| read(folder.join("memory.usage_in_bytes")))?;
            // v1 writes "no limit" as a number near 2^63.
            (limit < 1 << 62).then(|| limit.saturating_sub(used))
        })
        .min()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn quotas_round_up_to_whole_cores() {
        assert_eq!(parse_cpu_max("max 100000"), None);
        assert_eq!(parse_cpu_max("-1 100000"), None);
        assert_eq!(parse_cpu_max("50000 100000"), Some(1));
        assert_eq!(parse_cpu_max("200000 100000\n"), Some(2));
        assert_eq!(parse_cpu_max("250000 100000"), Some(3));
        assert_eq!(parse_cpu_max("100000 0"), None);
        assert_eq!(parse_cpu_max(""), None);
    }

    #[test]
    fn meminfo_is_in_kib() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12 * 1024));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn there_is_at_least_one_core() {
        assert!(usable_cores() >= 1);
    }
}
