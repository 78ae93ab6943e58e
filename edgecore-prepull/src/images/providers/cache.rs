//! The cache of one provider's answers, in memory only.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prepull_api::credentials::RegistryConfig;
use tokio::time::Instant;

use super::protocol::CacheKeyType;

/// Answers kept for one provider. The longest tokens (ECR's) are about 3 KiB, so a cache takes at most a third of a
/// MiB. If it's full, the plugin is asked again.
pub(super) const MAX_ENTRIES: usize = 128;
/// The longest time for which we keep an answer: longer than an agent runs without a restart, yet short enough to add
/// to any `Instant` without overflow.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);

/// An image as plugins know it: without tag and digest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ImageName {
    /// The registry's host and port.
    pub(super) registry: String,
    /// The repository, including the registry.
    pub(super) name: String,
}

/// The images that a cached answer is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum CacheKey {
    Image(String),
    Registry(String),
    Global,
}

impl CacheKey {
    pub(super) fn new(kind: CacheKeyType, image: &ImageName) -> Self {
        match kind {
            CacheKeyType::Image => Self::Image(image.name.clone()),
            CacheKeyType::Registry => Self::Registry(image.registry.clone()),
            CacheKeyType::Global => Self::Global,
        }
    }

    /// All keys that may hold an answer for the image, in the kubelet's order of lookup.
    fn all_for(image: &ImageName) -> [Self; 3] {
        [CacheKeyType::Image, CacheKeyType::Registry, CacheKeyType::Global].map(|kind| Self::new(kind, image))
    }
}

/// The answers of one provider. Expired ones are wiped at the next request.
#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: HashMap<CacheKey, (Instant, Arc<RegistryConfig>)>,
}

impl Cache {
    /// The answer for the image: its own first, then that of its registry, then the global one.
    pub(super) fn get(&mut self, image: &ImageName, now: Instant) -> Option<Arc<RegistryConfig>> {
        self.entries.retain(|_, (expires, _)| *expires > now);
        CacheKey::all_for(image)
            .iter()
            .find_map(|key| self.entries.get(key))
            .map(|(_, logins)| logins.clone())
    }

    /// Keeps an answer for the duration `keep`; not at all if that's zero.
    pub(super) fn put(&mut self, key: CacheKey, logins: Arc<RegistryConfig>, keep: Duration, now: Instant) {
        if keep.is_zero() {
            return;
        }
        self.entries.retain(|_, (expires, _)| *expires > now);
        if self.entries.len() >= MAX_ENTRIES && !self.entries.contains_key(&key) {
            let first = self.entries.iter().min_by_key(|(_, (expires, _))| *expires);
            if let Some(first) = first.map(|(key, _)| key.clone()) {
                self.entries.remove(&first);
            }
        }
        self.entries.insert(key, (now + keep.min(FOREVER), logins));
    }

    /// Removes every answer that is used for the image.
    pub(super) fn forget(&mut self, image: &ImageName) {
        for key in CacheKey::all_for(image) {
            self.entries.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use prepull_api::credentials::Sensitive;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn image(registry: &str, repository: &str) -> ImageName {
        ImageName { registry: registry.to_owned(), name: format!("{registry}/{repository}") }
    }

    fn logins(user: &str) -> Arc<RegistryConfig> {
        Arc::new(RegistryConfig::from_logins([(
            "r.io".to_owned(),
            Sensitive::new(user),
            Sensitive::new("p"),
        )]))
    }

    #[test]
    fn an_answer_serves_images_of_its_key() {
        use CacheKeyType::{Global, Image, Registry};
        let asked = image("r.io", "a");
        for (kind, served) in [
            (Image, [true, false, false, false]),
            (Registry, [true, true, false, false]),
            (Global, [true, true, true, true]),
        ] {
            let mut cache = Cache::default();
            let now = Instant::now();
            cache.put(CacheKey::new(kind, &asked), logins("u"), MINUTE, now);
            let others = [asked.clone(), image("r.io", "b"), image("r.io:5000", "a"), image("s.io", "a")];
            assert_eq!(others.map(|other| cache.get(&other, now).is_some()), served, "{kind:?}");
        }
    }

    #[test]
    fn the_narrowest_answer_is_used() {
        let mut cache = Cache::default();
        let (now, asked) = (Instant::now(), image("r.io", "a"));
        for kind in [CacheKeyType::Global, CacheKeyType::Registry, CacheKeyType::Image] {
            cache.put(CacheKey::new(kind, &asked), logins(&format!("{kind:?}")), MINUTE, now);
            assert_eq!(cache.get(&asked, now), Some(logins(&format!("{kind:?}"))));
        }
        cache.forget(&asked);
        assert_eq!(cache.get(&asked, now), None);
    }

    #[test]
    fn an_answer_expires_on_time() {
        let mut cache = Cache::default();
        let (now, asked) = (Instant::now(), image("r.io", "a"));
        let key = || CacheKey::new(CacheKeyType::Image, &asked);
        cache.put(key(), logins("u"), Duration::ZERO, now);
        assert_eq!(cache.entries.len(), 0, "not even until the next look");
        cache.put(key(), logins("u"), MINUTE, now);
        assert!(cache.get(&asked, now + MINUTE - Duration::from_millis(1)).is_some());
        assert_eq!(cache.get(&asked, now + MINUTE), None);
        assert_eq!(cache.entries.len(), 0, "it is wiped");
        cache.put(key(), logins("u"), Duration::MAX, now);
        assert!(cache.get(&asked, now + 1000 * MINUTE).is_some());
    }

    #[test]
    fn a_full_cache_drops_the_first_to_expire() {
        let mut cache = Cache::default();
        let now = Instant::now();
        let names: Vec<_> = (0..=MAX_ENTRIES).map(|n| image("r.io", &n.to_string())).collect();
        for (n, name) in names.iter().enumerate() {
            let keep = if n == 5 { MINUTE } else { 2 * MINUTE };
            cache.put(CacheKey::new(CacheKeyType::Image, name), logins("u"), keep, now);
        }
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
        let gone: Vec<_> = names
            .iter()
            .enumerate()
            .filter(|(_, name)| cache.get(name, now).is_none())
            .map(|(n, _)| n)
            .collect();
        assert_eq!(gone, [5]);
    }
}
