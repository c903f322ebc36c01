//! JSON schemas of the API's types, and query strings that are parsed by them. Pure.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// A generator whose schemas refer to the components of the OpenAPI document.
pub fn component_generator(is_request: bool) -> SchemaGenerator {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    match is_request {
        true => settings.for_deserialize().into_generator(),
        false => settings.for_serialize().into_generator(),
    }
}

/// The properties of a query type, each with its own schema, and whether it is required.
pub fn parameters<Q: schemars::JsonSchema>() -> Vec<Parameter> {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let mut generator = settings.for_deserialize().into_generator();
    let schema = generator.root_schema_for::<Q>().to_value();
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let properties = schema["properties"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    properties
        .into_iter()
        .map(|(name, schema)| Parameter {
            is_required: required.contains(&Value::from(name.as_str())),
            schema: without_null(schema),
            name,
        })
        .collect()
}

/// A parameter of a query.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its schema.
    pub schema: Value,
    /// Whether it must be present.
    pub is_required: bool,
}

/// A parameter is absent rather than null.
fn without_null(mut schema: Value) -> Value {
    if let Some(types) = schema.get_mut("type").and_then(Value::as_array_mut) {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            schema["type"] = only.clone();
        }
    }
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.retain(|value| !value.is_null());
    }
    if let Some(object) = schema.as_object_mut() {
        object.remove("default");
        let any = object.get("anyOf").and_then(Value::as_array).cloned();
        if let Some(first) = any.and_then(|any| any.first().cloned()) {
            let description = object.get("description").cloned();
            let mut first = first;
            if let (Some(first), Some(description)) = (first.as_object_mut(), description) {
                first.insert("description".to_owned(), description);
            }
            return first;
        }
    }
    schema
}

/// Parses a query string. Unknown and repeated parameters are errors.
pub fn parse_query<Q: DeserializeOwned>(query: &str, parameters: &[Parameter]) -> Result<Q> {
    let mut values = Map::new();
    for (name, text) in url::form_urlencoded::parse(query.as_bytes()) {
        let Some(parameter) = parameters.iter().find(|known| known.name == name) else {
            let names: Vec<&str> = parameters.iter().map(|known| known.name.as_str()).collect();
            let hint = match names.is_empty() {
                true => "remove it: the operation has no parameters".to_owned(),
                false => format!("use {}", names.join(", ")),
            };
            return Err(Error::usage(format!("unknown parameter {name:?}")).hint(hint));
        };
        let invalid = |expected: &str| {
            Error::usage(format!(
                "invalid {name} value {text:?}: expected {expected}"
            ))
        };
        let value = match parameter.schema["type"].as_str() {
            Some("integer") => {
                Value::from(text.parse::<u64>().map_err(|_| invalid("a whole number"))?)
            }
            Some("boolean") => {
                Value::from(text.parse::<bool>().map_err(|_| invalid("true or false"))?)
            }
            Some("array") => {
                let list = values
                    .entry(name.clone().into_owned())
                    .or_insert_with(|| Value::Array(Vec::new()));
                if let Some(list) = list.as_array_mut() {
                    list.push(Value::from(text.as_ref()));
                }
                continue;
            }
            _ => Value::from(text.as_ref()),
        };
        check_range(&name, &value, &parameter.schema)?;
        if values.insert(name.clone().into_owned(), value).is_some() {
            return Err(Error::usage(format!("parameter {name:?} occurs twice")));
        }
    }
    serde_json::from_value(Value::Object(values))
        .map_err(|cause| Error::usage(format!("invalid query: {cause}")))
}

fn check_range(name: &str, value: &Value, schema: &Value) -> Result<()> {
    let (Some(number), Some(min), Some(max)) = (
        value.as_u64(),
        schema["minimum"].as_u64(),
        schema["maximum"].as_u64(),
    ) else {
        return Ok(());
    };
    match (min..=max).contains(&number) {
        true => Ok(()),
        false => Err(Error::usage(format!(
            "invalid {name} value {number}: expected {min} to {max}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Deserialize, schemars::JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Query {
        text: Option<String>,
        #[serde(default)]
        label: Vec<String>,
        #[schemars(range(min = 1, max = 10))]
        limit: Option<u32>,
        #[serde(default)]
        full: bool,
        role: Option<crate::model::Role>,
    }

    fn parse(query: &str) -> Result<Query> {
        parse_query(query, &parameters::<Query>())
    }

    #[test]
    fn a_query_is_parsed_by_the_schema_of_its_type() {
        let query = parse("text=a%20b&label=x%3D1&label=y%3D2&limit=10&full=true&role=tool");
        let expected = Query {
            text: Some("a b".to_owned()),
            label: vec!["x=1".to_owned(), "y=2".to_owned()],
            limit: Some(10),
            full: true,
            role: Some(crate::model::Role::Tool),
        };
        assert_eq!(query.unwrap(), expected);
        for bad in [
            "limit=0",
            "limit=11",
            "limit=x",
            "limit=-1",
            "full=yes",
            "other=1",
            "role=pope",
            "text=a&text=b",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_parameter_is_never_null() {
        for parameter in parameters::<Query>() {
            assert!(
                !parameter.schema.to_string().contains("null"),
                "{parameter:?}"
            );
            assert!(!parameter.is_required);
        }
    }
}
