//! Tasks that upgrade the agent.

use prepull_api::task::Upgrade;
use prepull_registry::digest::sha256;

use super::*;
use crate::upgrade::{Obstacles, UpgradeFiles, Upgrades};

#[tokio::test]
async fn the_tried_program_is_that_of_the_verified_image() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let key = dir.path().join("upgrade.pub");
    std::fs::write(&key, "the key")?;
    let upgrades = Arc::new(Upgrades::new(dir.path(), Obstacles::default()).with_key(key));
    let fake = Fake::new();
    let program = |version: &str| format!("#!/bin/sh\necho edgecore-prepull {version}\n").into_bytes();
    // `sha256:i` was pulled. The reference has got another image since.
    let files = [("sha256:i", "2.0.0"), ("agent:2", "6.6.6")];
    fake.state.lock().unwrap().files =
        files.map(|(image, version)| (image.to_owned(), program(version))).into();
    let mut execution = execution(vec![always("agent:2")]);
    execution.task.upgrade = Some(Upgrade { within: Duration::from_secs(60), packaged: false });

    let executor = executor(&fake);
    let executor = Arc::into_inner(executor).unwrap().with_upgrades(Arc::clone(&upgrades));
    let mut run = start(&Arc::new(executor), execution);
    tokio::select! {
        () = upgrades.wait_for_restart() => {}
        end = &mut run.end => panic!("{end:?}"),
    }
    let record = UpgradeFiles::in_state_dir(dir.path()).read_record()?;
    assert_eq!(record.digests().collect::<Vec<_>>(), [sha256(&program("2.0.0"))]);
    Ok(())
}
