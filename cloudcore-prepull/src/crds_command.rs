//! `cloudcore-prepull crds`: the definitions, from the types themselves.

use std::io::Write;

use anyhow::Context;
use prepull_api::crd::{job, report};

use crate::args::CrdsArgs;

/// File name and content of each definition.
pub fn definitions() -> anyhow::Result<Vec<(&'static str, String)>> {
    let job =
        serde_saphyr::to_string(&job::crd()).context("write the definition of ImagePrePullJob as YAML")?;
    let report = serde_saphyr::to_string(&report::crd())
        .context("write the definition of ImagePrePullReport as YAML")?;
    Ok(vec![
        ("operations.kubeedge.io_imageprepulljobs.yaml", job),
        ("operations.kubeedge.io_imageprepullreports.yaml", report),
    ])
}

/// Prints them, or writes them to files.
pub fn run(args: &CrdsArgs, out: &mut impl Write) -> anyhow::Result<()> {
    for (name, yaml) in definitions()? {
        match &args.out {
            None => write!(out, "---\n{yaml}")?,
            Some(folder) => {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("make the folder {}", folder.display()))?;
                let path = folder.join(name);
                std::fs::write(&path, &yaml).with_context(|| format!("write {}", path.display()))?;
                writeln!(out, "{}", path.display())?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_in_definitions_are_those_of_the_types() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests/crds/");
        for (name, yaml) in definitions().unwrap() {
            let checked_in = std::fs::read_to_string(format!("{folder}{name}")).unwrap_or_default();
            assert!(checked_in == yaml, "manifests/crds/{name} is not what the types say: run `make crds`");
        }
    }
}
