//! skeleton
/// `cloudcore-prepull token …`
#[derive(Debug, clap::Subcommand)]
pub enum TokenCommand {
    /// Lists
    List,
}
/// Carries out the command. The result for stdout goes to `out`.
pub async fn run(
    _command: TokenCommand,
    _client: kube::Client,
    _namespace: &str,
    _out: &mut (dyn std::io::Write + Send),
) -> anyhow::Result<()> {
    todo!()
}
