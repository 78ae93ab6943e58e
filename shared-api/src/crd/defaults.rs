//! Correction of generated schemas: their defaults, and the formats of their integers.
//!
//! The derives give a default to every field that may be absent. Users read the defaults of a definition, so that only
//! those that carry information may remain.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};

/// Corrects the schemas of a definition of ours, and lets more be corrected in its status.
pub(super) fn correct(crd: &mut CustomResourceDefinition, status: impl Fn(&mut JSONSchemaProps)) {
    for version in &mut crd.spec.versions {
        if let Some(root) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            remove_empty_defaults(root);
            replace_unsigned_formats(root);
            if let Some(schema) = root.properties.as_mut().and_then(|fields| fields.get_mut("status")) {
                remove_all_defaults(schema);
                status(schema);
            }
        }
    }
}

/// Removes defaults that only say that a field may be absent: objects, null and the empty string.
fn remove_empty_defaults(schema: &mut JSONSchemaProps) {
    if schema.default.as_ref().is_some_and(|JSON(value)| value.is_object() || value.is_null() || value == "")
    {
        schema.default = None;
    }
    children(schema).for_each(remove_empty_defaults);
}

/// Removes all defaults, as in a status, which only cloudcore fills in.
pub(super) fn remove_all_defaults(schema: &mut JSONSchemaProps) {
    schema.default = None;
    children(schema).for_each(remove_all_defaults);
}

/// Replaces the formats of unsigned integers by `int64` with the same bounds: OpenAPI doesn't have them, and newer API
/// servers warn about them.
pub(super) fn replace_unsigned_formats(schema: &mut JSONSchemaProps) {
    let maximum = match schema.format.as_deref() {
        Some("uint8") => Some(u8::MAX.into()),
        Some("uint16") => Some(u16::MAX.into()),
        Some("uint32") => Some(u32::MAX.into()),
        _ => None, // the greatest int64 is the bound of its own format
    };
    if schema.format.as_deref().is_some_and(|format| format.starts_with("uint")) {
        schema.format = Some("int64".to_owned());
        schema.minimum = schema.minimum.or(Some(0.0));
        schema.maximum = schema.maximum.or(maximum);
    }
    children(schema).for_each(replace_unsigned_formats);
}

fn children(schema: &mut JSONSchemaProps) -> impl Iterator<Item = &mut JSONSchemaProps> {
    let items = schema.items.iter_mut().filter_map(|items| match items {
        JSONSchemaPropsOrArray::Schema(schema) => Some(schema.as_mut()),
        JSONSchemaPropsOrArray::Schemas(_) => None, // not structural, so never generated
    });
    let values = schema.additional_properties.iter_mut().filter_map(|values| match values {
        JSONSchemaPropsOrBool::Schema(schema) => Some(schema.as_mut()),
        JSONSchemaPropsOrBool::Bool(_) => None,
    });
    schema.properties.iter_mut().flatten().map(|(_, schema)| schema).chain(items).chain(values)
}
