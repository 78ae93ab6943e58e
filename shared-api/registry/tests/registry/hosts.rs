//! hosts.toml, against containerd's rules.
