//! Limits that a process sets for itself before it holds any secret.

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};

/// Lets no other process of the same user read this one's memory, and no crash write it to a disk: it will hold keys and
/// the credentials of registries. Memory may still be swapped out; that is the machine's business.
pub fn protect_memory() {
    // Fails only for an unknown value. There is no log yet that could report it.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Raises the soft limit of open files to the hard one. Each connection is an open file, and many systems begin with 1,024,
/// which a few idle connections use up.
pub fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
}

/// How many files this process may have open; `None` if there's no limit.
pub fn open_files_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
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
    fn raises_the_soft_limit_to_the_hard_one() {
        raise_open_files();
        assert_eq!(open_files_limit(), getrlimit(Resource::Nofile).maximum);
    }
}
