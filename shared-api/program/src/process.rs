//! What a process sets for itself before it holds any secret.

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};

/// Lets no other process of the same user read this one's memory, and no crash write it to a disk: it will hold keys and
/// the credentials of registries. Memory may still be swapped out; that is the machine's business.
pub fn protect_memory() {
    // Only an unknown value can fail. Were it to fail all the same, there would be no log yet to say so.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Allows this process as many open files as it may allow itself. Each connection is one, and many systems begin with
/// 1,024, which a few idle connections use up.
pub fn raise_open_files(needed: u64) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
    if let Some(maximum) = maximum.filter(|maximum| *maximum < needed) {
        tracing::warn!(
            maximum,
            needed,
            "the limit of open files is low for a large fleet: raise it (LimitNOFILE, ulimit -Hn)"
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::process::dumpable_behavior;

    use super::*;

    #[test]
    fn a_protected_process_leaves_no_core_dump() {
        protect_memory();
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
    }

    #[test]
    fn open_files_are_as_many_as_may_be() {
        raise_open_files(1);
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!(current, maximum);
    }
}
