//! Lists that are read page by page: not all of their objects have to be in memory.

use std::fmt::Debug;

use futures::Stream;
use futures::stream::try_unfold;
use kube::api::{Api, ListParams};
use serde::de::DeserializeOwned;

/// The pages of a list, each of `asked.limit` objects at most.
pub(crate) fn pages<K>(api: Api<K>, asked: ListParams) -> impl Stream<Item = kube::Result<Vec<K>>>
where
    K: Clone + Debug + DeserializeOwned,
{
    // The state is the query for the next page; `None` after the last one.
    try_unfold((api, Some(asked)), async |(api, asked)| {
        let Some(asked) = asked else { return Ok(None) };
        let page = api.list(&asked).await?;
        let token = page.metadata.continue_.filter(|token| !token.is_empty());
        let next = token.map(|token| ListParams { continue_token: Some(token), ..asked });
        Ok(Some((page.items, (api, next))))
    })
}
