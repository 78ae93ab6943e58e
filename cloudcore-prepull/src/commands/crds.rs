//! The command `cloudcore-prepull crds`: the custom resource definitions, generated from the types.

use std::io::Write;

use anyhow::Context;
use prepull_api::crd::{job, kruise, report, settings};

use crate::commands::args::CrdsArgs;

/// The file name and content of each definition.
fn prepull_definitions() -> anyhow::Result<Vec<(&'static str, String)>> {
    let job =
        serde_saphyr::to_string(&job::crd()).context("write the definition of ImagePrePullJob as YAML")?;
    let report = serde_saphyr::to_string(&report::crd())
        .context("write the definition of ImagePrePullReport as YAML")?;
    let settings = serde_saphyr::to_string(&settings::crd())
        .context("write the definition of ImagePrePullSettings as YAML")?;
    Ok(vec![
        ("operations.kubeedge.io_imageprepulljobs.yaml", job),
        ("operations.kubeedge.io_imageprepullreports.yaml", report),
        ("operations.kubeedge.io_imageprepullsettings.yaml", settings),
    ])
}

/// The file name and content of the definitions of Kruise's kinds, for clusters where we serve their API.
fn kruise_definitions() -> anyhow::Result<Vec<(&'static str, String)>> {
    let mut all = String::new();
    for crd in kruise::crds() {
        let yaml = serde_saphyr::to_string(&crd).context("write the definition of a Kruise kind as YAML")?;
        if !all.is_empty() {
            all.push_str("---\n");
        }
        all.push_str(&yaml);
    }
    Ok(vec![("crds.yaml", all)])
}

pub(crate) fn run(args: &CrdsArgs, out: &mut impl Write) -> anyhow::Result<()> {
    for (name, yaml) in if args.kruise { kruise_definitions()? } else { prepull_definitions()? } {
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
    fn the_checked_in_definitions_match_the_types() {
        let manifests = concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests");
        for (folder, files) in
            [("crds", prepull_definitions().unwrap()), ("kruise", kruise_definitions().unwrap())]
        {
            for (name, yaml) in files {
                let checked_in =
                    std::fs::read_to_string(format!("{manifests}/{folder}/{name}")).unwrap_or_default();
                assert!(
                    checked_in == yaml,
                    "manifests/{folder}/{name} is not what the types say: run `make crds`"
                );
            }
        }
    }
}
