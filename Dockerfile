# Workers for anystep-cache on runners that start containers: --sdk_container_image of Dataflow, and the
# DOCKER environments of Flink and Spark. Two commands make it, at the top of the checkout:
#
#   python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
#   docker build --tag REGISTRY/anystep:0.1.0 . && docker push REGISTRY/anystep:0.1.0
#
# Python's and Beam's versions are those of whoever starts the job: functions travel pickled. Tasks that
# --module_import names are found where the workers' Python finds modules: add them below, or send them
# with --setup_file or --extra_package.
FROM apache/beam_python3.11_sdk:2.77.0

COPY requirements.lock dist/anystep-0.1.0.tar.gz /tmp/anystep/
RUN pip install --no-cache-dir --constraint /tmp/anystep/requirements.lock \
      "anystep[cache,stores] @ file:///tmp/anystep/anystep-0.1.0.tar.gz" \
    && rm -r /tmp/anystep

# For tasks of your own:
#   COPY my_tasks.py /opt/tasks/
#   ENV PYTHONPATH=/opt/tasks
