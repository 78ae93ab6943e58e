//! Rules that select the requests for each fault.

use super::Fault;
use crate::chance::Chance;

/// The verb of a request, in the terms of Kubernetes' authorisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads one object.
    Get,
    /// Reads many objects.
    List,
    /// Follows the changes of objects.
    Watch,
    /// Creates an object.
    Create,
    /// Replaces an object.
    Update,
    /// Changes an object.
    Patch,
    /// Removes one or many objects.
    Delete,
}

/// The target of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Verb of the request.
    pub verb: Verb,
    /// Resource, such as `nodes`; the path if the request is not for an object of the API.
    pub resource: String,
    /// Name of the object; empty if the request is for many.
    pub name: String,
    /// Subresource, such as `status`, or empty.
    pub subresource: String,
}

impl About {
    /// Derives it from method and target of the request.
    pub(super) fn of(method: &http::Method, uri: &http::Uri) -> Self {
        let parts: Vec<_> = uri.path().split('/').filter(|part| !part.is_empty()).collect();
        let below = match parts[..] {
            ["api", _, ref below @ ..] | ["apis", _, _, ref below @ ..] => below,
            _ => &[],
        };
        let below = match below {
            // A namespace is itself an object.
            ["namespaces", _, inside @ ..]
                if inside.len() > 1 || matches!(inside, [kind] if *kind != "status") =>
            {
                inside
            }
            below => below,
        };
        let part = |index: usize| below.get(index).map(ToString::to_string).unwrap_or_default();
        let is_watch =
            uri.query().unwrap_or_default().split('&').any(|pair| ["watch=true", "watch=1"].contains(&pair));
        let verb = match *method {
            http::Method::POST => Verb::Create,
            http::Method::PUT => Verb::Update,
            http::Method::PATCH => Verb::Patch,
            http::Method::DELETE => Verb::Delete,
            _ if is_watch => Verb::Watch,
            _ if below.len() == 1 => Verb::List,
            _ => Verb::Get,
        };
        let resource = below.first().map_or_else(|| uri.path().to_owned(), ToString::to_string);
        Self { verb, resource, name: part(1), subresource: part(2) }
    }
}

/// A selection of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requests {
    verbs: Option<&'static [Verb]>,
    resource: Option<&'static str>,
    name: Option<&'static str>,
}

impl Requests {
    /// All requests.
    pub const ALL: Self = Self { verbs: None, resource: None, name: None };
    /// Requests that change something.
    pub const WRITES: Self = Self::verbs(&[Verb::Create, Verb::Update, Verb::Patch, Verb::Delete]);
    /// Requests that begin a watch.
    pub const WATCHES: Self = Self::verbs(&[Verb::Watch]);
    /// Requests that list objects, at the start or after a watch has ended.
    pub const LISTS: Self = Self::verbs(&[Verb::List]);

    /// Requests with one of these verbs.
    #[must_use]
    pub const fn verbs(verbs: &'static [Verb]) -> Self {
        Self { verbs: Some(verbs), ..Self::ALL }
    }

    /// Narrows the selection to a resource, such as `nodes`.
    #[must_use]
    pub const fn on(self, resource: &'static str) -> Self {
        Self { resource: Some(resource), ..self }
    }

    /// Narrows the selection to the objects of this name.
    #[must_use]
    pub const fn named(self, name: &'static str) -> Self {
        Self { name: Some(name), ..self }
    }

    pub(super) fn fit(self, about: &About) -> bool {
        self.verbs.is_none_or(|verbs| verbs.contains(&about.verb))
            && self.resource.is_none_or(|resource| resource == about.resource)
            && self.name.is_none_or(|name| name == about.name)
    }
}

/// A fault, and the requests that meet it.
pub(super) struct Rule {
    pub(super) requests: Requests,
    pub(super) share: f64,
    pub(super) fault: Fault,
    /// Number of strikes left. `None` for no limit.
    pub(super) left: Option<u32>,
}

impl Rule {
    pub(super) fn strikes(&mut self, about: &About, chance: &mut Chance) -> Option<Fault> {
        if !self.requests.fit(about) || self.left == Some(0) || !chance.happens(self.share) {
            return None;
        }
        self.left = self.left.map(|left| left - 1);
        Some(self.fault)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use http::Method;

    use super::*;

    fn about(method: &Method, uri: &str) -> (Verb, String, String, String) {
        let About { verb, resource, name, subresource } = About::of(method, &uri.parse().unwrap());
        (verb, resource, name, subresource)
    }

    #[test]
    fn requests_are_classified() {
        let jobs = "/apis/operations.kubeedge.io/v1alpha2/imageprepulljobs";
        let said = |verb, resource: &str, name: &str, sub: &str| {
            (verb, resource.to_owned(), name.to_owned(), sub.to_owned())
        };
        for (method, uri, expected) in [
            (Method::GET, "/api/v1/nodes?limit=500", said(Verb::List, "nodes", "", "")),
            (Method::GET, "/api/v1/nodes?watch=true&x=1", said(Verb::Watch, "nodes", "", "")),
            (Method::GET, "/api/v1/nodes/edge-1", said(Verb::Get, "nodes", "edge-1", "")),
            (Method::GET, "/api/v1/namespaces/default", said(Verb::Get, "namespaces", "default", "")),
            (Method::GET, "/api/v1/namespaces/a/secrets/b", said(Verb::Get, "secrets", "b", "")),
            (Method::POST, "/api/v1/namespaces/a/secrets", said(Verb::Create, "secrets", "", "")),
            (
                Method::PATCH,
                &format!("{jobs}/j/status?fieldManager=x"),
                said(Verb::Patch, "imageprepulljobs", "j", "status"),
            ),
            (Method::GET, "/readyz", said(Verb::Get, "/readyz", "", "")),
        ] {
            assert_eq!(about(&method, uri), expected, "{uri}");
        }
    }

    #[test]
    fn a_rule_hits_its_share_of_requests() {
        let about = About::of(&Method::PATCH, &"/api/v1/nodes/a".parse().unwrap());
        let mut chance = Chance::new(7, 0);
        let mut rule = Rule { requests: Requests::WRITES, share: 0.3, fault: Fault::Cut, left: None };
        let struck = (0..10_000).filter(|_| rule.strikes(&about, &mut chance).is_some()).count();
        assert!((2_850..3_150).contains(&struck), "{struck}");
        let mut rule = Rule { share: 1.0, left: Some(3), ..rule };
        assert_eq!((0..10).filter(|_| rule.strikes(&about, &mut chance).is_some()).count(), 3);
        let read = About::of(&Method::GET, &"/api/v1/nodes/a".parse().unwrap());
        let mut rule = Rule { left: None, ..rule };
        assert_eq!(rule.strikes(&read, &mut chance), None);
    }
}
