//! skeleton
/// `edgecore-prepull join`
#[derive(Debug, clap::Args)]
pub struct JoinArgs {}
/// Why
#[derive(Debug, thiserror::Error)]
pub enum JoinError {}
/// Joins.
pub async fn run(_args: JoinArgs) -> Result<(), JoinError> {
    todo!()
}
