//! Objects of a list or a watch, parsed one by one: an unreadable object doesn't stop the others.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use prepull_api::task::JobUid;
use prepull_engine::shared::objects::{ObjectId, Unreadable};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// The names of the kind that an object of another type is read from.
macro_rules! names_of {
    ($kind:ty) => {
        names_of!($kind, kind, group, version, plural);
    };
    ($kind:ty, $($name:ident),*) => {
        $(fn $name((): &()) -> std::borrow::Cow<'_, str> {
            <$kind as kube::Resource>::$name(&())
        })*
    };
}
pub(super) use names_of;

/// An object as the engines take it: without annotations and managed fields, which may be larger than all the rest
/// and say nothing to them. One that cannot be parsed is passed on as unreadable.
pub(crate) fn into_readable<K: Resource>(Guarded(object): Guarded<K>) -> Result<Box<K>, Unreadable> {
    let lean = |mut object: K| {
        let metadata = object.meta_mut();
        (metadata.annotations, metadata.managed_fields) = (None, None);
        Box::new(object)
    };
    object.map(lean).map_err(|(_, unreadable)| unreadable)
}

/// An object, so that one with a field of the wrong type stops neither a list nor a watch. Of such a one metadata, and the
/// times of a job, are kept: it may be running, or have ended.
#[derive(Clone, Debug)]
pub(crate) struct Guarded<K>(Result<K, (ObjectMeta, Unreadable)>);

impl<'de, K: DeserializeOwned> Deserialize<'de> for Guarded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let error = match K::deserialize(&value) {
            Ok(object) => return Ok(Self(Ok(object))),
            Err(error) => format!("the object cannot be read: {error}"),
        };
        let metadata = ObjectMeta::deserialize(&value["metadata"]).map_err(D::Error::custom)?;
        let time = |field: &str| Option::deserialize(&value["status"][field]).unwrap_or_default();
        let unreadable = Unreadable {
            id: ObjectId {
                namespace: metadata.namespace.clone().unwrap_or_default(),
                name: metadata.name.clone().unwrap_or_default(),
                uid: JobUid(metadata.uid.clone().unwrap_or_default()),
            },
            generation: metadata.generation.unwrap_or_default(),
            error,
            start_time: time("startTime"),
            completion_time: time("completionTime"),
        };
        Ok(Self(Err((metadata, unreadable))))
    }
}

impl<K: Resource<DynamicType = ()>> Resource for Guarded<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    names_of!(K);

    fn meta(&self) -> &ObjectMeta {
        match &self.0 {
            Ok(object) => object.meta(),
            Err((metadata, _)) => metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match &mut self.0 {
            Ok(object) => object.meta_mut(),
            Err((metadata, _)) => metadata,
        }
    }
}

/// The id of an object, readable or not.
pub(crate) fn id_of<K: Resource>(object: &Result<Box<K>, Unreadable>) -> ObjectId {
    match object {
        Ok(object) => ObjectId {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
            uid: JobUid(object.uid().unwrap_or_default()),
        },
        Err(unreadable) => unreadable.id.clone(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::crd::kruise::ImagePullJob;
    use serde_json::json;

    use super::*;

    fn read(object: Value) -> Result<Box<ImagePullJob>, Unreadable> {
        into_readable(serde_json::from_value::<Guarded<ImagePullJob>>(object).unwrap())
    }

    #[test]
    fn an_unreadable_job_keeps_name_and_times() {
        let metadata = json!({"namespace": "shop", "name": "a", "uid": "u", "generation": 3});
        let status = json!({"startTime": "2026-01-02T03:04:05Z", "completionTime": "2026-01-02T03:05:05Z"});
        let unreadable =
            read(json!({"metadata": metadata, "spec": {"image": 7}, "status": status})).unwrap_err();
        assert!(unreadable.error.starts_with("the object cannot be read: "), "{}", unreadable.error);
        assert_eq!((unreadable.id.name.as_str(), unreadable.id.namespace.as_str()), ("a", "shop"));
        let times = [unreadable.start_time, unreadable.completion_time];
        let times = times.map(|time| time.unwrap().0.to_string());
        assert_eq!(
            (unreadable.generation, times),
            (3, ["2026-01-02T03:04:05Z", "2026-01-02T03:05:05Z"].map(str::to_owned))
        );
        // A status that makes no sense either is none.
        let unreadable =
            read(json!({"metadata": metadata, "spec": 7, "status": {"startTime": 7}})).unwrap_err();
        assert_eq!((unreadable.start_time, unreadable.completion_time), (None, None));
    }
}
