//! The addresses under which other hosts may find this one, read from /proc. Decides their order: those of
//! the network first, this host's own last.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses at most: a host with more is found under the first.
const MAX_ADDRESSES: usize = crate::frame::MAX_ADDRESSES;

/// This host's name, or what the system calls it when it has none.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    let end = name.floor_char_boundary(200);
    if name.is_empty() { "a host without a name".to_owned() } else { name[..end].to_owned() }
}

/// IPv4 addresses, then IPv6, then loopback: at least that.
pub(crate) fn local_addresses() -> Vec<IpAddr> {
    let trie = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let inet6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    ordered(ipv4_of_trie(&trie).into_iter().map(IpAddr::V4), ipv6_of_table(&inet6).into_iter().map(IpAddr::V6))
}

fn ordered(ipv4: impl Iterator<Item = IpAddr>, ipv6: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    for address in ipv4.chain(ipv6).filter(|address| !address.is_loopback()) {
        if !found.contains(&address) && found.len() + 1 < MAX_ADDRESSES {
            found.push(address);
        }
    }
    found.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    found
}

/// `/proc/net/fib_trie`: an address's line is followed by `/32 host LOCAL` where it is this host's own.
fn ipv4_of_trie(text: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut last: Option<Ipv4Addr> = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last);
        }
    }
    found
}

/// `/proc/net/if_inet6`: 32 hexadecimal digits, then index, prefix length, scope (00: global), flags, name.
fn ipv6_of_table(text: &str) -> Vec<Ipv6Addr> {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let digits = fields.next()?;
        let scope = fields.nth(2)?;
        let bits = u128::from_str_radix(digits, 16).ok()?;
        (digits.len() == 32 && scope == "00").then(|| Ipv6Addr::from_bits(bits))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_told_from_networks() {
        let trie = "Main:\n  +-- 10.0.0.0/24 2 0 2\n     |-- 10.0.0.0\n        /24 link UNICAST\n     |-- 10.0.0.7\n        \
                    /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n  |-- 127.0.0.1\n     /32 host LOCAL\n";
        assert_eq!(ipv4_of_trie(trie), [Ipv4Addr::new(10, 0, 0, 7), Ipv4Addr::LOCALHOST]);
        let table = "fe800000000000000000000000000001 02 40 20 80 eth0\n\
                     fd000000000000000000000000000002 02 40 00 80 eth0\nrubbish\n\
                     00000000000000000000000000000001 01 80 10 80 lo\n";
        assert_eq!(ipv6_of_table(table), ["fd00::2".parse::<Ipv6Addr>().unwrap()]);
    }

    #[test]
    fn loopback_is_always_there_and_last() {
        let v4 = |last| IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
        let own = || IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(ordered([own(), v4(1), v4(1)].into_iter(), [].into_iter()), [v4(1), own()]);
        assert_eq!(ordered((0..200).map(v4), [].into_iter()).len(), MAX_ADDRESSES);
        assert_eq!(local_addresses().last(), Some(&own()));
        assert!(!host_name().is_empty());
    }
}
