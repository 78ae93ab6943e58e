#![allow(clippy::unwrap_used, clippy::expect_used)]

use proptest::prelude::*;

use super::*;

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn selectors_match_as_in_kubernetes() {
    let node = labels(&[("region", "hangzhou"), ("gpu", ""), ("cores", "8"), ("k.io/in", "x")]);
    for (text, expected) in [
        ("", true),
        ("  ", true),
        ("region", true),
        ("zone", false),
        ("!zone", true),
        ("!region", false),
        ("! zone", true),
        ("region=hangzhou", true),
        ("region==hangzhou", true),
        ("region = hangzhou", true),
        ("region=shanghai", false),
        ("region!=shanghai", true),
        ("region!=hangzhou", false),
        ("zone!=a", true),
        ("zone=a", false),
        ("gpu=", true),
        ("gpu", true),
        ("gpu=,region", true),
        ("region=", false),
        ("region in (hangzhou, shanghai)", true),
        ("region in (shanghai)", false),
        ("region in(hangzhou)", true),
        ("zone in (a)", false),
        ("zone notin (a,b)", true),
        ("region notin (hangzhou)", false),
        ("gpu in (,a)", true),
        ("region in (,a)", false),
        // Kubernetes' parser reads empty brackets as one empty value.
        ("gpu in ()", true),
        ("region in ()", false),
        ("zone in ()", false),
        ("gpu notin ( )", false),
        ("region notin ()", true),
        ("zone notin ()", true),
        ("k.io/in=x", true),
        ("in", false),
        ("in in (in)", false),
        ("cores>7", true),
        ("cores>8", false),
        ("cores<9", true),
        ("cores > 7", true),
        ("region>1", false),
        ("zone<1", false),
        ("region=hangzhou,gpu,!zone,cores>1", true),
        ("region=hangzhou,zone", false),
    ] {
        let selector = Selector::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(selector.matches(&node), expected, "{text}");
    }
    let odd = labels(&[("in", "in"), ("notin", "x")]);
    assert!(Selector::parse("in in (in),notin").unwrap().matches(&odd));
}

#[test]
fn an_error_names_what_is_wrong_and_what_is_expected() {
    let long = "a".repeat(64);
    for (text, message) in [
        ("=a", "label selector \"=a\": found = where a label key is expected"),
        ("a,", "found the end where a label key is expected"),
        (",a", "found a comma where a label key is expected"),
        ("a b", "found \"b\" where one of = == != in notin < > , or the end is expected"),
        ("a=b c", "found \"c\" where a comma or the end is expected"),
        ("a=b=c", "found = where a comma or the end is expected"),
        ("a in b", "found \"b\" where an opening bracket is expected"),
        ("a in (b", "found the end where a comma or a closing bracket is expected"),
        ("a in (b c)", "found \"c\" where a comma or a closing bracket is expected"),
        ("!a=b", "found = where a comma or the end is expected"),
        ("!", "found the end where a label key is expected"),
        ("(a)", "found ( where a label key is expected"),
        ("-a", "\"-a\" is not a label key"),
        ("a/b/c", "\"a/b/c\" is not a label key"),
        ("/a", "\"/a\" is not a label key"),
        ("A_b.io/a", "\"A_b.io/a\" is not a label key"),
        ("k.io/", "\"k.io/\" is not a label key"),
        (&long, "is not a label key"),
        ("a=-b", "\"-b\" is not a value that label a can have"),
        ("a=b/c", "\"b/c\" is not a value that label a can have"),
        (&format!("a={long}"), "is not a value that label a can have"),
        ("a>b", "label a: \"b\" is not an integer"),
        ("a>", "label a: \"\" is not an integer"),
        // No label can have such a value, and Kubernetes refuses it here as well.
        ("a>-1", "\"-1\" is not a value that label a can have"),
        ("a<+1", "\"+1\" is not a value that label a can have"),
    ] {
        let error = Selector::parse(text).unwrap_err().to_string();
        assert!(error.contains(message), "{text:?}: {error}");
    }
}

#[cfg(feature = "crd")]
mod object {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
    use serde_json::json;

    use super::*;

    fn read(selector: serde_json::Value) -> Result<String, String> {
        let selector: LabelSelector = serde_json::from_value(selector).unwrap();
        Selector::try_from(&selector).map(|s| s.to_string()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_object_form_has_the_same_meaning() {
        assert_eq!(read(json!({})), Ok(String::new()));
        assert_eq!(
            read(json!({
                "matchLabels": {"b": "2", "a": "1"},
                "matchExpressions": [
                    {"key": "c", "operator": "In", "values": ["x", "y"]},
                    {"key": "d", "operator": "NotIn", "values": ["x"]},
                    {"key": "e", "operator": "Exists"},
                    {"key": "f", "operator": "DoesNotExist", "values": []},
                ]
            })),
            Ok("a=1,b=2,c in (x,y),d!=x,e,!f".to_owned())
        );
    }

    #[test]
    fn an_error_names_the_key_and_the_operator() {
        for (expression, message) in [
            (json!({"key": "a", "operator": "In"}), "label a: the operator in needs at least one value"),
            (
                json!({"key": "a", "operator": "Exists", "values": ["x"]}),
                "label a: the operator Exists takes no values",
            ),
            (
                json!({"key": "a", "operator": "Gt", "values": ["1"]}),
                "label a: unknown operator \"Gt\": use In, NotIn, Exists or DoesNotExist",
            ),
        ] {
            assert_eq!(read(json!({"matchExpressions": [expression]})), Err(message.to_owned()));
        }
        let error = read(json!({"matchLabels": {"a b": ""}})).unwrap_err();
        assert!(error.starts_with("\"a b\" is not a label key"), "{error}");
    }
}

fn selector_text() -> impl Strategy<Value = String> {
    let key = "([a-z]{1,4}\\.io/)?[a-zA-Z][a-zA-Z0-9_.-]{0,6}[a-z0-9]";
    let value = "([a-zA-Z0-9]{1,4})?";
    let requirement = (key, proptest::collection::vec(value, 1..4), 0..7).prop_map(|(key, values, form)| {
        let list = values.join(",");
        match form {
            0 => key,
            1 => format!("!{key}"),
            2 => format!("{key}={}", values[0]),
            3 => format!("{key} != {}", values[0]),
            4 => format!("{key} in (x,{list})"),
            5 => format!("{key} notin ( x , {list} )"),
            _ => format!("{key}>{}", values.len()),
        }
    });
    proptest::collection::vec(requirement, 0..4).prop_map(|requirements| requirements.join(" , "))
}

proptest! {
    #[test]
    fn a_selector_displays_as_a_text_that_parses_to_it(text in selector_text()) {
        let selector = Selector::parse(&text).unwrap();
        prop_assert_eq!(Selector::parse(&selector.to_string()).unwrap(), selector);
    }

    #[cfg(feature = "crd")]
    #[test]
    fn the_object_form_of_a_selector_selects_the_same(text in selector_text(), values in "[a-z]{0,2}") {
        use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
        let selector = Selector::parse(&text).unwrap();
        let Ok(object) = LabelSelector::try_from(&selector) else {
            prop_assert!(text.contains('>'));
            return Ok(());
        };
        let back = Selector::try_from(&object).unwrap();
        prop_assert_eq!(back.keys().count(), selector.keys().count());
        let all: BTreeMap<_, _> = selector.keys().map(|(key, _)| (key.to_owned(), values.clone())).collect();
        for labels in [BTreeMap::new(), all] {
            prop_assert_eq!(back.matches(&labels), selector.matches(&labels));
        }
    }

    #[test]
    fn parsing_any_text_never_panics(text in "[a-z=!<>(),/. é-]{0,30}") {
        let _ = Selector::parse(&text);
    }

    #[test]
    fn a_requirement_and_its_opposite_never_both_match(value in "[ab]?", present: bool) {
        let labels = if present { labels(&[("k", &value)]) } else { labels(&[]) };
        for (one, other) in [("k", "!k"), ("k=a", "k!=a"), ("k in (a,b)", "k notin (a,b)")] {
            let matches = |text| Selector::parse(text).unwrap().matches(&labels);
            prop_assert!(matches(one) != matches(other));
        }
    }
}

#[cfg(feature = "crd")]
#[test]
fn a_key_that_is_demanded_twice_stays_demanded_twice() {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
    let selector = Selector::parse("a=1,a=2,b").unwrap();
    let object = LabelSelector::try_from(&selector).unwrap();
    assert!(!Selector::try_from(&object).unwrap().matches(&labels(&[("a", "2"), ("b", "")])));
}
