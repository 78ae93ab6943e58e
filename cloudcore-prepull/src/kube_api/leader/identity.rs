//! The identity of this process in the election.

use ring::rand::{SecureRandom, SystemRandom};

use crate::kube_api::leader_label::own_pod;

/// The identity of this process as a holder of the Lease: the pod or the machine, and a random part. A restarted process
/// is another holder, because it cannot know whether its predecessor is really gone.
pub(super) fn new_identity() -> Result<String, ring::error::Unspecified> {
    let name = own_pod().or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok());
    let mut suffix = [0; 5];
    SystemRandom::new().fill(&mut suffix)?;
    let name = name.as_deref().map_or("cloudcore-prepull", str::trim);
    Ok(format!("{name}_{}", prepull_api::enroll::hex(&suffix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_its_own_identity() {
        let (one, other) = (new_identity().unwrap(), new_identity().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.rsplit_once('_').unwrap().0, other.rsplit_once('_').unwrap().0);
    }
}
