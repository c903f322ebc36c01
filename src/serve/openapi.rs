//! The OpenAPI 3.1 document, generated from the endpoints and the types of their handlers.

use serde_json::{Map, Value, json};

use super::endpoint::Endpoint;
use super::problem::{self, Problem};
use super::schema::component_generator;

/// The prefix of all paths.
pub const PREFIX: &str = "/api/v1";

/// The document. With `has_tokens`, every operation needs a bearer token.
pub fn document(endpoints: &[Endpoint], has_tokens: bool) -> Value {
    let mut replies = component_generator(false);
    let mut requests = component_generator(true);
    let problem = replies.subschema_for::<Problem>().to_value();
    let mut paths = Map::new();
    for endpoint in endpoints {
        let path = full_path(endpoint.path).replace("{*", "{");
        let mut operation = json!({
            "operationId": endpoint.name,
            "summary": endpoint.summary,
            "description": format!("Needs the role {}.", endpoint.role.as_str()),
            "parameters": parameters(endpoint),
            "responses": responses(endpoint, &problem, &mut replies),
        });
        if let Some(body) = endpoint.body {
            operation["requestBody"] = json!({
                "required": true,
                "content": { "application/json": { "schema": body(&mut requests) } },
            });
        }
        let method = endpoint.method.as_str().to_lowercase();
        let item = paths.entry(path).or_insert_with(|| json!({}));
        item[method] = operation;
    }
    paths.insert(format!("{PREFIX}/openapi.json"), own_path());
    let mut schemas = replies.take_definitions(true);
    schemas.extend(requests.take_definitions(true));
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "sessiond",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "Sessions of coding agents",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "paths": paths,
        "components": { "schemas": schemas },
    });
    if has_tokens {
        document["components"]["securitySchemes"] =
            json!({ "bearer": { "type": "http", "scheme": "bearer" } });
        document["security"] = json!([{ "bearer": [] }]);
    }
    document
}

/// The path of an endpoint with the namespace in front of it.
pub fn full_path(path: &str) -> String {
    format!("{PREFIX}/namespaces/{{namespace}}{path}")
}

/// This document needs no token: it contains no data.
fn own_path() -> Value {
    json!({ "get": {
        "operationId": "getOpenApi",
        "summary": "This document.",
        "security": [],
        "responses": { "200": {
            "description": "OK",
            "content": { "application/json": { "schema": { "type": "object" } } },
        } },
    } })
}

fn parameters(endpoint: &Endpoint) -> Vec<Value> {
    let path = full_path(endpoint.path);
    let names = path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let in_path = names.map(|name| {
        let name = name.trim_start_matches('*');
        json!({
            "name": name, "in": "path", "required": true,
            "schema": { "type": "string", "minLength": 1 },
        })
    });
    let in_query = endpoint.parameters.iter().map(|parameter| {
        json!({
            "name": parameter.name, "in": "query", "required": parameter.is_required,
            "schema": parameter.schema,
        })
    });
    in_path.chain(in_query).collect()
}

fn responses(
    endpoint: &Endpoint,
    problem: &Value,
    generator: &mut schemars::SchemaGenerator,
) -> Value {
    let reply = &endpoint.reply;
    let schema = match reply.schema {
        Some(schema) => schema(generator),
        None => json!({}),
    };
    let mut responses = json!({
        reply.status.to_string(): {
            "description": "Success",
            "content": { reply.media_type: { "schema": schema } },
        },
        "default": {
            "description": "An error",
            "content": { problem::MEDIA_TYPE: { "schema": problem } },
        },
    });
    if endpoint.method == axum::http::Method::GET {
        responses["304"] = json!({ "description": "The client has this version" });
    }
    if reply.schema.is_none() && reply.media_type != "text/event-stream" {
        responses["206"] = json!({
            "description": "A range of the bytes",
            "content": { reply.media_type: { "schema": {} } },
        });
    }
    responses
}
