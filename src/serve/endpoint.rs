//! One operation of the API: its route, the role that it needs, its types, and its handler.
//!
//! A route exists only as an [`Endpoint`]. The types of its handler define its documentation, and
//! no handler runs before the caller has the role.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::header::{CONTENT_TYPE, ETAG, HeaderMap, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use schemars::{JsonSchema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::access::Role;
use super::api::Api;
use super::problem::Problem;
use super::schema::{self, Parameter};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{AgentName, Digest, LogId, LogName, Namespace, PointSpec, SessionId, WriterId};
use crate::wire::Parts;

/// A request that was authenticated and authorized.
pub struct Call {
    /// The state of the server.
    pub api: Arc<Api>,
    /// The role of the caller in the namespace.
    pub role: Role,
    /// The namespace.
    pub namespace: Namespace,
    /// The agent and the session, if the route has them.
    pub session: Option<(AgentName, SessionId)>,
    /// The last part of the path, if the route has one: a name, a number or a path.
    pub item: Option<String>,
    /// The headers.
    pub headers: HeaderMap,
}

impl Call {
    /// Whether the caller may read conversations.
    pub fn reads_content(&self) -> bool {
        self.role >= Role::Reader
    }

    /// The parts for the session, and its ID.
    pub fn session(&self) -> Result<(Parts, LogId)> {
        let Some((agent, session)) = &self.session else {
            return Err(Error::new(ErrorKind::Internal, "the route has no session"));
        };
        let (namespace, agent) = (self.namespace.clone(), agent.clone());
        let parts = self.api.parts.for_logs_of(namespace, agent)?;
        let id = parts.logs.id(LogName::Session(session.clone()));
        Ok((parts, id))
    }

    /// The last part of the path.
    pub fn item(&self) -> &str {
        self.item.as_deref().unwrap_or_default()
    }

    /// The point of a query; the end of the session without one.
    pub fn point(at: Option<&str>) -> Result<PointSpec> {
        at.map_or(Ok(PointSpec::default()), |text| {
            PointSpec::parse("at", text)
        })
    }

    /// The branch of a query; none is the main line.
    pub async fn branch(parts: &Parts, id: &LogId, text: Option<&str>) -> Result<Option<WriterId>> {
        match text {
            Some(text) => parts.logs.find_branch(id, text.trim()).await.map(Some),
            None => Ok(None),
        }
    }
}

/// The value of a response.
pub struct Reply<R> {
    value: R,
    status: StatusCode,
    etag: Option<String>,
}

/// The result of an operation that answers with JSON.
pub type Answer<R> = Result<Reply<R>, Problem>;

impl<R> Reply<R> {
    /// A response with status 200.
    pub fn ok(value: R) -> Reply<R> {
        Reply {
            value,
            status: StatusCode::OK,
            etag: None,
        }
    }

    /// A response with status 201.
    pub fn created(value: R) -> Reply<R> {
        Reply {
            status: StatusCode::CREATED,
            ..Reply::ok(value)
        }
    }

    /// The response with this entity tag instead of a hash of the value.
    #[must_use]
    pub fn with_etag(self, etag: String) -> Reply<R> {
        Reply {
            etag: Some(etag),
            ..self
        }
    }
}

/// Whether an operation appears in the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audit {
    /// It shows no text of a conversation.
    Never,
    /// It shows titles or texts to callers that may read conversations.
    IfReader,
    /// It shows a conversation, or changes something.
    Always,
}

/// The media type of a response, and the schema of its value.
pub struct ReplyType {
    /// The status.
    pub status: u16,
    /// The media type.
    pub media_type: &'static str,
    /// The schema of a JSON value.
    pub schema: Option<fn(&mut SchemaGenerator) -> Value>,
}

type Handler = Arc<
    dyn Fn(Call, String, Option<Bytes>) -> BoxFuture<'static, Result<Response, Problem>>
        + Send
        + Sync,
>;

/// An operation of the API.
pub struct Endpoint {
    /// The HTTP method.
    pub method: Method,
    /// The path below the namespace.
    pub path: &'static str,
    /// The name in the OpenAPI document and in the audit log.
    pub name: &'static str,
    /// The role that it needs.
    pub role: Role,
    /// Whether it appears in the audit log.
    pub audit: Audit,
    /// One sentence.
    pub summary: &'static str,
    /// The parameters of the query.
    pub parameters: Arc<Vec<Parameter>>,
    /// The schema of the request body.
    pub body: Option<fn(&mut SchemaGenerator) -> Value>,
    /// The response.
    pub reply: ReplyType,
    /// Does the work.
    pub handler: Handler,
}

/// The route of an endpoint that has no handler yet.
pub struct Route {
    method: Method,
    path: &'static str,
    name: &'static str,
    role: Role,
    audit: Audit,
    summary: &'static str,
}

/// A route that reads.
pub fn get(path: &'static str, name: &'static str, role: Role, summary: &'static str) -> Route {
    Route {
        method: Method::GET,
        path,
        name,
        role,
        audit: match role {
            Role::Metadata => Audit::IfReader,
            Role::Reader | Role::Operator | Role::Admin => Audit::Always,
        },
        summary,
    }
}

/// A route that changes something.
pub fn change(
    method: Method,
    path: &'static str,
    name: &'static str,
    role: Role,
    summary: &'static str,
) -> Route {
    Route {
        method,
        path,
        name,
        role,
        audit: Audit::Always,
        summary,
    }
}

fn schema_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}

impl Route {
    /// The route of an operation that shows no text of a conversation.
    pub fn without_content(self) -> Route {
        Route {
            audit: Audit::Never,
            ..self
        }
    }

    fn endpoint(
        self,
        parameters: Arc<Vec<Parameter>>,
        body: Option<fn(&mut SchemaGenerator) -> Value>,
        reply: ReplyType,
        handler: Handler,
    ) -> Endpoint {
        Endpoint {
            method: self.method,
            path: self.path,
            name: self.name,
            role: self.role,
            audit: self.audit,
            summary: self.summary,
            parameters,
            body,
            reply,
            handler,
        }
    }

    /// Answers with JSON.
    pub fn json<Q, R, F, Fut>(self, handler: F) -> Endpoint
    where
        Q: DeserializeOwned + JsonSchema + Send + 'static,
        R: Serialize + JsonSchema + Send + 'static,
        F: Fn(Call, Q) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Answer<R>> + Send + 'static,
    {
        let parameters = Arc::new(schema::parameters::<Q>());
        let (handler, known) = (Arc::new(handler), parameters.clone());
        let handler: Handler = Arc::new(move |call, query, _| {
            let (handler, known) = (handler.clone(), known.clone());
            Box::pin(async move {
                let query = schema::parse_query(&query, &known)?;
                let headers = call.headers.clone();
                json_response(handler(call, query).await?, &headers)
            })
        });
        let reply = ReplyType {
            status: 200,
            media_type: "application/json",
            schema: Some(schema_of::<R>),
        };
        self.endpoint(parameters, None, reply, handler)
    }

    /// Takes a JSON body and answers with JSON, with this status.
    pub fn json_body<B, R, F, Fut>(self, status: StatusCode, handler: F) -> Endpoint
    where
        B: DeserializeOwned + JsonSchema + Send + 'static,
        R: Serialize + JsonSchema + Send + 'static,
        F: Fn(Call, B) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Answer<R>> + Send + 'static,
    {
        let handler = Arc::new(handler);
        let handler: Handler = Arc::new(move |call, query, body| {
            let handler = handler.clone();
            Box::pin(async move {
                let NoQuery {} = schema::parse_query(&query, &[])?;
                let body = serde_json::from_slice(&body.unwrap_or_default())
                    .map_err(|cause| Error::usage(format!("invalid request body: {cause}")))?;
                let headers = call.headers.clone();
                json_response(handler(call, body).await?, &headers)
            })
        });
        let reply = ReplyType {
            status: status.as_u16(),
            media_type: "application/json",
            schema: Some(schema_of::<R>),
        };
        self.endpoint(Arc::default(), Some(schema_of::<B>), reply, handler)
    }

    /// Answers with bytes.
    pub fn bytes<Q, F, Fut>(self, media_type: &'static str, handler: F) -> Endpoint
    where
        Q: DeserializeOwned + JsonSchema + Send + 'static,
        F: Fn(Call, Q) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Response, Problem>> + Send + 'static,
    {
        let parameters = Arc::new(schema::parameters::<Q>());
        let (handler, known) = (Arc::new(handler), parameters.clone());
        let handler: Handler = Arc::new(move |call, query, _| {
            let (handler, known) = (handler.clone(), known.clone());
            Box::pin(async move {
                let query = schema::parse_query(&query, &known)?;
                handler(call, query).await
            })
        });
        let reply = ReplyType {
            status: 200,
            media_type,
            schema: None,
        };
        self.endpoint(parameters, None, reply, handler)
    }
}

/// The query of an operation without parameters.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoQuery {}

/// A JSON response; 304 if the client has the same value.
fn json_response<R: Serialize>(reply: Reply<R>, request: &HeaderMap) -> Result<Response, Problem> {
    let body = serde_json::to_vec(&reply.value)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode the response").caused_by(cause))?;
    let etag = reply
        .etag
        .unwrap_or_else(|| format!("\"{:.32}\"", Digest::of(&body).to_string()));
    let mut response = match matches_etag(request, &etag) {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => {
            let mut response = (reply.status, body).into_response();
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(CONTENT_TYPE, json);
            response
        }
    };
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        response.headers_mut().insert(ETAG, etag);
    }
    Ok(response)
}

/// Whether the client has this version: one of the tags in `If-None-Match`.
pub fn matches_etag(request: &HeaderMap, etag: &str) -> bool {
    has_tag(request, IF_NONE_MATCH, etag)
}

/// Whether the client expects another version: `If-Match` is present and has not this tag.
pub fn expects_other_version(request: &HeaderMap, etag: &str) -> bool {
    request.contains_key(IF_MATCH) && !has_tag(request, IF_MATCH, etag)
}

fn has_tag(request: &HeaderMap, name: axum::http::HeaderName, etag: &str) -> bool {
    let values = request.get_all(name);
    let tags = values
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim);
    tags.map(|tag| tag.strip_prefix("W/").unwrap_or(tag))
        .any(|tag| tag == "*" || tag == etag)
}
